//! QEMU's guest agent: a program in the guest that sets its clock.
//!
//! A guest's clock goes on where it stood; how long it stood only its host knows.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::place::{Config, Place};

/// A guest that has just been resumed answers late. Everything that is said takes so long at most.
const TALK_MAX: Duration = Duration::from_secs(5);
/// Lines before the answer: what was said to whoever asked before.
const LINES_MAX: usize = 16;
/// All that is read of what the guest says, in bytes.
const ANSWERS_BYTES_MAX: u64 = 64 << 10;

/// Sets the guest's clock by its agent; in words what came of it.
pub fn set_clock(config: &Config, place: &Place) -> String {
    if !config.agent {
        return "not set: start the guest with --agent".into();
    }
    match set_time(place) {
        Ok(()) => "set by the agent".into(),
        Err(e) => format!("not set: {e}"),
    }
}

/// Sets the guest's clock to the host's.
fn set_time(place: &Place) -> io::Result<()> {
    talk(place.connect("agent")?, Instant::now() + TALK_MAX)
}

fn talk(stream: UnixStream, until: Instant) -> io::Result<()> {
    let mut to = Timed { stream: stream.try_clone()?, until };
    let mut answers = BufReader::new(Timed { stream, until }.take(ANSWERS_BYTES_MAX));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?.as_nanos() as u64;
    let id = now & 0x7fff_ffff;
    // A half command of earlier ends here.
    to.write_all(b"\n")?;
    writeln!(to, "{}", json!({ "execute": "guest-sync", "arguments": { "id": id } }))?;
    answer(&mut answers, |value| value["return"] == id)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?.as_nanos() as u64;
    writeln!(to, "{}", json!({ "execute": "guest-set-time", "arguments": { "time": now } }))?;
    answer(&mut answers, |value| value.get("return").is_some())
}

/// A connection to the guest that ends in time, whatever it says, and however slowly.
struct Timed {
    stream: UnixStream,
    until: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the agent does not answer in time");
        if left.is_zero() { Err(late()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(to)
    }
}

impl Write for Timed {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn answer(from: &mut impl BufRead, is_it: impl Fn(&Value) -> bool) -> io::Result<()> {
    for _ in 0..LINES_MAX {
        let mut line = Vec::new();
        if from.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        match serde_json::from_slice::<Value>(&line) {
            Ok(value) if is_it(&value) => return Ok(()),
            Ok(value) if value.get("error").is_some() => {
                let why = value["error"]["desc"].as_str().unwrap_or("it refuses");
                return Err(io::Error::other(format!("the agent says: {why}")));
            }
            _ => {}
        }
    }
    Err(io::Error::other("the agent does not answer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_were_told_is_passed_over() {
        let mut said: &[u8] = b"\xffgarbage\n{\"return\":1}\n{\"return\":7}\n";
        assert!(answer(&mut said, |value| value["return"] == 7).is_ok());
        let mut said: &[u8] = b"{\"error\":{}}\n{\"return\":7}\n";
        assert!(answer(&mut said, |value| value["return"] == 7).is_err());
    }

    #[test]
    fn a_guest_that_never_ends_its_answer_is_left() {
        let (us, mut guest) = UnixStream::pair().unwrap();
        let zeros = std::thread::spawn(move || {
            let mut said = 0;
            while guest.write_all(&[0; 4096]).is_ok() {
                said += 4096;
            }
            said
        });
        assert!(talk(us, Instant::now() + Duration::from_secs(60)).is_err());
        let said = zeros.join().unwrap();
        assert!(said < 8 << 20, "{said} bytes were read of it");
        // A byte now and then is no answer either.
        let (us, mut guest) = UnixStream::pair().unwrap();
        let drops = std::thread::spawn(move || {
            while guest.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let begun = Instant::now();
        assert!(talk(us, begun + Duration::from_millis(200)).is_err());
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        drops.join().unwrap();
    }
}
