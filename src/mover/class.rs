//! What a program wants of its copies: that each is through soon, or that many are (EasyIO §4.4, L-apps and B-apps).
//!
//! A class is a pool's (`class=`, `LODE_CLASS`), an open file's or a call's, or follows from the I/O priority of who asks
//! ([`priority`](super::priority)); who has none is copied for as if
//! there were no classes. Copies of the calling thread have none either: nobody can hold those back.

use std::fmt;
use std::str::FromStr;

use super::EngineKind;

/// See the file's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Copies that somebody waits for.
    Latency,
    /// Copies of which only the sum counts: they yield to the others, and share what is left, owner by owner.
    Bandwidth(Owner),
}

/// Whose copies of class bandwidth: those of one owner have one share, whoever of its threads makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(u32);

impl Owner {
    /// By a number of the caller's choice, of which 31 bits count.
    pub fn of(id: u32) -> Owner {
        Owner(id & (u32::MAX >> 1))
    }

    /// This process.
    pub fn process() -> Owner {
        Owner::of(std::process::id())
    }

    pub fn id(self) -> u32 {
        self.0
    }
}

impl Class {
    /// Without an owner's number.
    pub fn name(self) -> &'static str {
        match self {
            Class::Latency => "latency",
            Class::Bandwidth(_) => "bandwidth",
        }
    }

    /// A number; 0 for none.
    pub(crate) fn code(class: Option<Class>) -> u32 {
        match class {
            None => 0,
            Some(Class::Latency) => 1,
            Some(Class::Bandwidth(Owner(id))) => id + 2,
        }
    }

    #[inline]
    pub(crate) fn of_code(code: u32) -> Option<Class> {
        match code {
            0 => None,
            1 => Some(Class::Latency),
            owner => Some(Class::Bandwidth(Owner(owner - 2))),
        }
    }
}

/// A name that no class has.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownClass(String);

impl fmt::Display for UnknownClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wanted = "latency, bandwidth or bandwidth:OWNER (a number below 2147483648) is wanted";
        write!(f, "there is no class '{}': {wanted}", self.0)
    }
}

impl std::error::Error for UnknownClass {}

impl FromStr for Class {
    type Err = UnknownClass;

    fn from_str(name: &str) -> Result<Class, UnknownClass> {
        let owner = |id: &str| id.parse().ok().filter(|id| Owner::of(*id).id() == *id).map(Owner::of);
        match (name, name.strip_prefix("bandwidth:").map(owner)) {
            ("latency", _) => Ok(Class::Latency),
            ("bandwidth", _) => Ok(Class::Bandwidth(Owner::process())),
            (_, Some(Some(owner))) => Ok(Class::Bandwidth(owner)),
            _ => Err(UnknownClass(name.to_owned())),
        }
    }
}

/// Who is to copy, and as what; for what is not said, the pool's own counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Via {
    pub engine: Option<EngineKind>,
    pub class: Option<Class>,
}

impl From<Option<EngineKind>> for Via {
    fn from(engine: Option<EngineKind>) -> Via {
        Via { engine, class: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_codes_come_back() {
        let own = Class::Bandwidth(Owner::process());
        assert_eq!("latency".parse(), Ok(Class::Latency));
        assert_eq!("bandwidth".parse(), Ok(own));
        assert_eq!("bandwidth:7".parse(), Ok(Class::Bandwidth(Owner::of(7))));
        for wrong in ["", "fast", "bandwidth:", "bandwidth:-1", "bandwidth:2147483648", "latency:1"] {
            let said = wrong.parse::<Class>().unwrap_err().to_string();
            assert!(said.contains(&format!("'{wrong}'")) && said.contains("latency, bandwidth"), "{said}");
        }
        let largest = Class::Bandwidth(Owner::of(u32::MAX));
        for class in
            [None, Some(Class::Latency), Some(own), Some(Class::Bandwidth(Owner::of(0))), Some(largest)]
        {
            assert_eq!(Class::of_code(Class::code(class)), class);
        }
    }
}
