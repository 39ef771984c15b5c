//! QMP, the machine emulator's protocol: JSON, a line each way, one command at a time, events in between.
//!
//! Of our own, because what is needed is this much, and the crates that speak it bring all of the protocol's types and pass
//! no descriptors.
//!
//! Emulators take a command byte by byte, each by a system call or two, and read the next one when they have answered: so lines are
//! short, and what needs no answer of one another is sent at once.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lodestone::error::{Error, Result};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

const SITE: &str = "wsp::qmp";
/// An answer is waited for so long.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(30);
/// A line that is longer is no answer, in bytes.
const LINE_BYTES_MAX: usize = 16 << 20;

/// A connection to an emulator.
pub struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    events: VecDeque<Value>,
    /// Commands that nobody has looked at the answer of yet, and whether the emulator got a descriptor with it.
    owed: VecDeque<(&'static str, bool)>,
    /// Of the first command, until it is answered: what comes before that was for who had the socket before, and was killed.
    first: Option<u64>,
    /// Its version, in its own words.
    pub version: String,
    /// And its first two numbers.
    pub release: (u64, u64),
}

impl Qmp {
    /// Reads the greeting, and agrees on nothing special.
    pub fn begin(stream: UnixStream) -> Result<Qmp> {
        let mut qmp = Qmp {
            stream,
            buffer: Vec::new(),
            events: VecDeque::new(),
            owed: VecDeque::new(),
            first: None,
            version: String::new(),
            release: (0, 0),
        };
        let until = Instant::now() + ANSWER_WAIT_MAX;
        let greeting = qmp.greeting(until)?;
        let version = &greeting["QMP"]["version"];
        let (number, package) = (&version["qemu"], version["package"].as_str().unwrap_or_default());
        let part = |name: &str| number[name].as_u64();
        let (Some(major), Some(minor), Some(micro)) = (part("major"), part("minor"), part("micro")) else {
            return Err(failed(format!("the emulator greets with {greeting}, which is not QMP")));
        };
        qmp.release = (major, minor);
        qmp.version = format!("{major}.{minor}.{micro} {package}").trim().to_string();
        let id = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64 % 1_000_000_000);
        qmp.first = Some(id);
        qmp.send("qmp_capabilities", &json!({}), qmp.first, None)?;
        qmp.owed.push_back(("qmp_capabilities", false));
        Ok(qmp)
    }

    /// Waits for the greeting. Before it may come what the emulator had to say to who was here before, from anywhere in a line.
    fn greeting(&mut self, until: Instant) -> Result<Value> {
        loop {
            let line = self.line(until)?;
            match parsed(&line) {
                Ok(old) if ["return", "error", "event"].iter().any(|kind| old.get(kind).is_some()) => {}
                Err(_) if line.trim_ascii_end().ends_with(b"}") => {}
                greeting => return greeting,
            }
        }
    }

    /// Runs a command: its answer.
    pub fn run(&mut self, command: &'static str, arguments: Value) -> Result<Value> {
        let [answer] = self.run_all([(command, arguments)])?;
        answer
    }

    /// Runs commands one after the other, each whatever became of those before it: their answers. An error where what was told
    /// before was refused, or nobody answers.
    pub fn run_all<const N: usize>(
        &mut self,
        commands: [(&'static str, Value); N],
    ) -> Result<[Result<Value>; N]> {
        for (command, arguments) in &commands {
            self.send(command, arguments, None, None)?;
        }
        let told = self.settle()?;
        let mut answers = commands.map(|(command, _)| (command, Ok(Value::Null)));
        for (command, answer) in &mut answers {
            *answer = self.answer(command)?;
        }
        told.map(|()| answers.map(|(_, answer)| answer))
    }

    /// Has a command run, with a descriptor that the emulator gets; it answers nothing but that it was. If it refuses, whatever comes
    /// next says so.
    pub fn tell(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        // It has room for one descriptor, until the command has taken that.
        if fd.is_some() && self.owed.iter().any(|(_, with_fd)| *with_fd) {
            self.settle()??;
        }
        self.send(command, &arguments, None, fd)?;
        self.owed.push_back((command, fd.is_some()));
        Ok(())
    }

    /// Takes all answers to what it was told: the first refusal; an error where there is no answer.
    fn settle(&mut self) -> Result<Result<()>> {
        let mut settled = Ok(());
        while let Some((command, _)) = self.owed.pop_front() {
            settled = settled.and(self.answer(command)?.map(drop));
        }
        Ok(settled)
    }

    fn send(
        &mut self,
        command: &str,
        arguments: &Value,
        id: Option<u64>,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let mut line = match arguments.as_object().is_some_and(|arguments| arguments.is_empty()) {
            true => json!({ "execute": command }),
            false => json!({ "execute": command, "arguments": arguments }),
        };
        if let Some(id) = id {
            line["id"] = id.into();
        }
        let mut line = line.to_string();
        line.push('\n');
        let mut bytes = line.as_bytes();
        let fds = fd.map(|fd| [fd]);
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            // With the first byte.
            if let Some(fds) = fds.as_ref().filter(|_| bytes.len() == line.len()) {
                assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is room for one");
            }
            let sent =
                sendmsg(self.stream.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
            match sent {
                Ok(sent) => bytes = &bytes[sent..],
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(failed(format!("the emulator does not take `{command}`: {e}"))),
            }
        }
        Ok(())
    }

    /// What it answers, or why it refuses; an error where there is no answer.
    fn answer(&mut self, command: &str) -> Result<Result<Value>> {
        let until = Instant::now() + ANSWER_WAIT_MAX;
        loop {
            let line = self.line(until).and_then(|line| parsed(&line));
            let mut line = line.map_err(|e| e.context(format_args!("`{command}`")))?;
            if let Some(id) = self.first {
                if line["id"] != id {
                    continue;
                }
                self.first = None;
            }
            if line.get("event").is_some() {
                self.events.push_back(line);
            } else if let Some(error) = line.get("error") {
                let why = error["desc"].as_str().unwrap_or("no reason given").to_string();
                return Ok(Err(failed(format!("the emulator refuses `{command}`: {why}"))));
            } else {
                return Ok(Ok(line["return"].take()));
            }
        }
    }

    /// Waits for an event of this name for which `wanted` has an answer.
    pub fn event<T>(&mut self, name: &str, mut wanted: impl FnMut(&Value) -> Option<T>) -> Result<T> {
        self.settle()??;
        let until = Instant::now() + ANSWER_WAIT_MAX;
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => {
                    let line = self.line(until).and_then(|line| parsed(&line));
                    line.map_err(|e| e.context(format_args!("waiting for {name}")))?
                }
            };
            if event["event"] == name
                && let Some(found) = wanted(&event["data"])
            {
                return Ok(found);
            }
        }
    }

    fn line(&mut self, until: Instant) -> Result<Vec<u8>> {
        let mut looked = 0;
        loop {
            if let Some(end) = self.buffer[looked..].iter().position(|b| *b == b'\n') {
                return Ok(self.buffer.drain(..=looked + end).collect());
            }
            looked = self.buffer.len();
            if looked > LINE_BYTES_MAX {
                return Err(failed("the emulator's answer does not end".into()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(silent());
            }
            self.stream.set_read_timeout(Some(left)).map_err(|e| failed(e.to_string()))?;
            let mut some = [0; 1 << 14];
            match self.stream.read(&mut some) {
                Ok(0) => return Err(failed("the emulator has ended".into())),
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(failed("the emulator has ended".into()));
                }
                Ok(n) => self.buffer.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(silent());
                }
                Err(e) => return Err(failed(format!("the emulator cannot be read from: {e}"))),
            }
        }
    }
}

fn parsed(line: &[u8]) -> Result<Value> {
    serde_json::from_slice(line).map_err(|e| failed(format!("the emulator's answer is not understood: {e}")))
}

fn failed(message: String) -> Error {
    Error::message(libc::EIO, SITE, message)
}

fn silent() -> Error {
    let message = format!("the emulator has not answered for {} s", ANSWER_WAIT_MAX.as_secs());
    Error::message(libc::ETIMEDOUT, SITE, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};

    const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":1},"package":"P"}}}"#;

    /// An emulator that says these lines after the greeting, one for each command.
    fn emulator(answers: &'static [&'static str]) -> Qmp {
        emulator_after(["", ""], answers)
    }

    /// As `emulator`, with what it has left to say to somebody else, before it greets and after that.
    fn emulator_after(left: [&'static str; 2], answers: &'static [&'static str]) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut to = theirs.try_clone().unwrap();
            let mut from = BufReader::new(theirs);
            to.write_all(format!("{}{GREETING}\n{}", left[0], left[1]).as_bytes()).unwrap();
            for answer in std::iter::once(&"first").chain(answers) {
                let mut line = String::new();
                if from.read_line(&mut line).unwrap() == 0 {
                    return;
                }
                let command = serde_json::from_str::<Value>(&line).unwrap();
                let answer = match *answer {
                    "first" => json!({ "return": {}, "id": command["id"] }).to_string(),
                    answer => answer.into(),
                };
                to.write_all(answer.as_bytes()).and_then(|()| to.write_all(b"\n")).unwrap();
            }
        });
        Qmp::begin(ours).unwrap()
    }

    #[test]
    fn answers_events_and_errors_are_told_apart() {
        let mut qmp = emulator(&[
            "{\"event\":\"STOP\",\"data\":{}}\n{\"return\":{\"n\":1}}",
            "{\"error\":{\"class\":\"GenericError\",\"desc\":\"no such thing\"}}",
            "{\"error\":{\"class\":\"GenericError\",\"desc\":\"not that\"}}",
            "{\"return\":2}",
        ]);
        assert_eq!((qmp.version.as_str(), qmp.release), ("7.2.1 P", (7, 2)));
        assert_eq!(qmp.run("stop", json!({})).unwrap()["n"], 1);
        qmp.event("STOP", |_| Some(())).unwrap();
        let e = qmp.run("migrate", json!({})).unwrap_err().to_string();
        assert!(e.contains("`migrate`") && e.contains("no such thing"), "{e}");
        let [one, other] = qmp.run_all([("a", json!({})), ("b", json!({ "n": 1 }))]).unwrap();
        assert!(one.unwrap_err().to_string().contains("`a`: not that"));
        assert_eq!(other.unwrap(), 2);
        let e = qmp.run("stop", json!({})).unwrap_err().to_string();
        assert!(e.contains("ended") || e.contains("does not take"), "{e}");
    }

    #[test]
    fn what_was_told_and_refused_is_said_once_and_nothing_else_is_mistaken_for_its_answer() {
        let mut qmp = emulator(&[
            "{\"return\":{}}",
            "{\"error\":{\"class\":\"GenericError\",\"desc\":\"no room\"}}",
            "{\"event\":\"STOP\",\"data\":{}}\n{\"return\":{\"n\":1}}",
            "{\"return\":{\"n\":2}}",
        ]);
        let (end, _other) = UnixStream::pair().unwrap();
        qmp.tell("getfd", json!({ "fdname": "a" }), Some(end.as_fd())).unwrap();
        // The first one is taken by then.
        qmp.tell("getfd", json!({ "fdname": "b" }), Some(end.as_fd())).unwrap();
        let e = qmp.run("query-status", json!({})).unwrap_err().to_string();
        assert!(e.contains("`getfd`: no room"), "{e}");
        assert_eq!(qmp.run("query-status", json!({})).unwrap()["n"], 2);
        qmp.event("STOP", |_| Some(())).unwrap();
    }

    #[test]
    fn what_was_for_another_before_is_passed_over() {
        let before = "turn\": {}}\r\n{\"return\":{}}\n{\"event\":\"STOP\",\"data\":{}}\n";
        let behind = "{\"error\":{\"class\":\"GenericError\",\"desc\":\"gone\"}}\n{\"event\":\"STOP\",\"data\":{}}\n{\"return\":7}\n";
        let mut qmp =
            emulator_after([before, behind], &["{\"return\":1}\n{\"event\":\"STOP\",\"data\":{\"n\":1}}"]);
        assert_eq!(qmp.run("stop", json!({})).unwrap(), 1);
        assert_eq!(qmp.event("STOP", |data| data["n"].as_u64()).unwrap(), 1);
    }

    #[test]
    fn what_is_not_qmp_is_refused() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"{\"hello\":1}\n").unwrap();
        assert!(Qmp::begin(ours).err().unwrap().to_string().contains("not QMP"));
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"SSH-2.0\n").unwrap();
        assert!(Qmp::begin(ours).err().unwrap().to_string().contains("not understood"));
    }
}
