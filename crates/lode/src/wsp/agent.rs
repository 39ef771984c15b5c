//! QEMU's guest agent: a program in the guest that sets its clock.
//!
//! A guest's clock goes on where it stood; how long it stood only its host knows.

use std::io::{self, BufRead, BufReader, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::place::Place;

/// A guest that has just been resumed answers late.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(5);
/// Lines before the answer: what was said to whoever asked before.
const LINES_MAX: usize = 16;

/// Sets the guest's clock to the host's.
pub fn set_time(place: &Place) -> io::Result<()> {
    let mut stream = place.connect("agent")?;
    stream.set_read_timeout(Some(ANSWER_WAIT_MAX))?;
    stream.set_write_timeout(Some(ANSWER_WAIT_MAX))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?.as_nanos() as u64;
    let id = now & 0x7fff_ffff;
    // A half command of earlier ends here.
    stream.write_all(b"\n")?;
    writeln!(stream, "{}", json!({ "execute": "guest-sync", "arguments": { "id": id } }))?;
    let mut answers = BufReader::new(stream.try_clone()?);
    answer(&mut answers, |value| value["return"] == id)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?.as_nanos() as u64;
    writeln!(stream, "{}", json!({ "execute": "guest-set-time", "arguments": { "time": now } }))?;
    answer(&mut answers, |value| value.get("return").is_some())
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
}
