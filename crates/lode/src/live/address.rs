//! Where a mount server answers, as people write it: `HOST:PORT`, or `unix:PATH`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::target::show;

/// See the file's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A name or number, and a port: looked up when it is used.
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let refused =
            || format!("'{text}' is no address: write HOST:PORT, as in 127.0.0.1:9847, or unix:PATH");
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(refused()) } else { Ok(Address::Unix(PathBuf::from(path))) };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(refused)?;
        // An IPv6 address stands in brackets: its own colons would be taken for the port's.
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let bracketed = bare.len() < host.len();
        let plain = !bare.is_empty() && (bracketed || !bare.contains([':', '/']));
        match port.parse::<u16>() {
            Ok(_) if plain => Ok(Address::Tcp(text.to_owned())),
            _ => Err(refused()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(text) => f.write_str(text),
            Address::Unix(path) => write!(f, "unix:{}", show(path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_paths_are_addresses() {
        for text in ["127.0.0.1:9847", "localhost:0", "[::1]:65535", "unix:/run/m.sock", "unix:m:1"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("unix:a".parse(), Ok(Address::Unix(PathBuf::from("a"))));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in
            ["", ":9847", "9847", "host", "host:", "host:65536", "::1:80", "[]:80", "unix:", "/run/a:1"]
        {
            let said = text.parse::<Address>().unwrap_err();
            assert!(said.contains("HOST:PORT") && said.contains("unix:PATH"), "{text}: {said}");
        }
    }
}
