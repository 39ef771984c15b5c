//! File names for people: a name is any bytes but `/` and NUL, a line of output is not.
//!
//! A name that is plain text is shown as it is. One with control characters, invalid UTF-8 or a look
//! that could be mistaken for quoting is shown as `$'...'`, which a shell turns back into the same bytes.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

/// A file's name in a message: on one line, whatever is in it.
pub trait Shown {
    fn shown(&self) -> Quoted<'_>;
}

impl<T: AsRef<OsStr> + ?Sized> Shown for T {
    fn shown(&self) -> Quoted<'_> {
        Quoted(self.as_ref().as_bytes())
    }
}

/// Displays bytes on one line.
#[derive(Clone, Copy)]
pub struct Quoted<'a>(pub &'a [u8]);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match std::str::from_utf8(self.0) {
            Ok(text) if is_plain(text) => f.write_str(text),
            _ => self.quote(f),
        }
    }
}

impl Quoted<'_> {
    fn quote(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("$'")?;
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '\n' => f.write_str("\\n")?,
                    '\t' => f.write_str("\\t")?,
                    '\r' => f.write_str("\\r")?,
                    '\'' => f.write_str("\\'")?,
                    '\\' => f.write_str("\\\\")?,
                    c if is_safe(c) => write!(f, "{c}")?,
                    c => c.encode_utf8(&mut [0; 4]).bytes().try_for_each(|b| write!(f, "\\{b:03o}"))?,
                }
            }
            // Octal takes three digits at most, so that a digit behind it is never part of it.
            chunk.invalid().iter().try_for_each(|b| write!(f, "\\{b:03o}"))?;
        }
        f.write_str("'")
    }
}

fn is_plain(text: &str) -> bool {
    !text.is_empty() && !text.starts_with("$'") && text.chars().all(is_safe)
}

/// Neither a control character nor one that changes the direction or the shape of what stands around it.
fn is_safe(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    #[test]
    fn plain_names_are_shown_as_they_are() {
        for name in ["a", "with space", "ä€", "it's", "back\\slash", "-rf", "a:b"] {
            assert_eq!(Quoted(name.as_bytes()).to_string(), name);
        }
    }

    #[test]
    fn others_are_quoted() {
        assert_eq!(Quoted(b"a\nb").to_string(), "$'a\\nb'");
        assert_eq!(Quoted(b"\xff1").to_string(), "$'\\3771'");
        assert_eq!(Quoted(b"").to_string(), "$''");
        assert_eq!(Quoted(b"$'x").to_string(), "$'$\\'x'");
        assert_eq!(Quoted("a\u{202e}b".as_bytes()).to_string(), "$'a\\342\\200\\256b'");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_shell_reads_the_same_bytes_back(name in proptest::collection::vec(1u8.., 1..40)) {
            let shown = Quoted(&name).to_string();
            prop_assert!(!shown.contains('\n'));
            if shown.starts_with("$'") {
                let script = format!("printf %s {shown}");
                let read = Command::new("bash").args(["-c", &script]).output().unwrap();
                prop_assert_eq!(read.stdout, name);
            } else {
                prop_assert_eq!(shown.as_bytes(), &name[..]);
            }
        }
    }
}
