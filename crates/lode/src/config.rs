//! The configuration file: TOML with the names of the flags. A flag beats the environment, the environment
//! beats the file.
//!
//! ```toml
//! assume = "memory"        # every subcommand that has --assume
//! [mkfs]
//! data = "inplace"         # lode mkfs --data inplace
//! ```
//!
//! The file's values become the *defaults* of the command-line definition, so that one parser, with one set
//! of checks and messages, reads all three. Read are /etc/lode.toml and ~/.config/lode/config.toml, the
//! second over the first, or only the file that `--config` or `LODE_CONFIG` names. An unknown key is an
//! error: a misspelt setting that does nothing is worse than a message.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use clap::{ArgAction, Command};
use toml::{Table, Value};

use crate::cli::setting_name;
use crate::failure::{Failure, Result};
use crate::target::show;

/// Largest configuration file, in bytes: it is read whole.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The definition with the files' values as defaults, and which file each setting came from.
pub struct Configured {
    pub command: Command,
    pub origin: HashMap<String, PathBuf>,
}

/// Finds and reads the files for this command line.
pub fn apply(command: Command, arguments: &[OsString]) -> Result<Configured> {
    let mut configured = Configured { command, origin: HashMap::new() };
    match named_file(arguments) {
        Some(file) => configured.merge(&file, &read(&file)?)?,
        None => {
            for file in standard_files() {
                match read(&file) {
                    Ok(table) => configured.merge(&file, &table)?,
                    Err(_) if is_absent(&file) => {}
                    Err(failure) => return Err(failure),
                }
            }
        }
    }
    Ok(configured)
}

/// `--config FILE` before a `--`, else `LODE_CONFIG`. The full parser cannot say: it needs the defaults that
/// the file is going to give.
fn named_file(arguments: &[OsString]) -> Option<PathBuf> {
    let mut arguments = arguments.iter().skip(1).take_while(|a| *a != "--");
    while let Some(argument) = arguments.next() {
        if argument == "--config" {
            return arguments.next().map(PathBuf::from);
        }
        if let Some(file) = argument.to_str().and_then(|a| a.strip_prefix("--config=")) {
            return Some(PathBuf::from(file));
        }
    }
    std::env::var_os("LODE_CONFIG").filter(|f| !f.is_empty()).map(PathBuf::from)
}

/// Where this user's files of configuration are.
pub fn user_dir() -> Option<PathBuf> {
    let home = |name: &str| std::env::var_os(name).filter(|v| Path::new(v).is_absolute()).map(PathBuf::from);
    let user = home("XDG_CONFIG_HOME").or_else(|| home("HOME").map(|h| h.join(".config")));
    user.map(|dir| dir.join("lode"))
}

fn standard_files() -> Vec<PathBuf> {
    let user = user_dir().map(|dir| dir.join("config.toml"));
    std::iter::once(PathBuf::from("/etc/lode.toml")).chain(user).collect()
}

fn is_absent(file: &Path) -> bool {
    use ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    matches!(std::fs::metadata(file), Err(e) if matches!(e.kind(), NotFound | NotADirectory | PermissionDenied))
}

fn read(file: &Path) -> Result<Table> {
    // Not 1, which is for what the command came to: of `fsck`, that it repaired.
    let failed = |e: std::io::Error| {
        Failure::usage(format_args!("cannot read the configuration file {}: {e}", show(file)))
    };
    let mut bytes = Vec::new();
    let file_open = File::open(file).map_err(failed)?;
    file_open.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(Failure::usage(format_args!(
            "{} is no configuration file: it is larger than {}",
            show(file),
            crate::size::Size(CONFIG_BYTES_MAX)
        )));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::usage(format_args!("{} is no configuration file: not UTF-8", show(file))))?;
    text.parse::<Table>().map_err(|e| {
        let line = e.span().map_or(1, |span| text[..span.start].lines().count().max(1));
        let message = e.message().lines().collect::<Vec<_>>().join(", ");
        Failure::usage(format_args!("{}, line {line}: {message}", show(file)))
    })
}

impl Configured {
    fn merge(&mut self, file: &Path, table: &Table) -> Result<()> {
        for (key, value) in table {
            match value {
                Value::Table(section) => self.section(file, key, section)?,
                value => self.everywhere(file, key, value)?,
            }
        }
        Ok(())
    }

    /// `[mkfs]`: settings of one subcommand.
    fn section(&mut self, file: &Path, name: &str, section: &Table) -> Result<()> {
        if self.command.find_subcommand(name).is_none() {
            return Err(unknown(file, &format!("[{name}]"), "no subcommand has this name"));
        }
        for (key, value) in section {
            if !self.set(file, name, key, value)? {
                return Err(unknown(file, &format!("{key} in [{name}]"), &why_unknown(key)));
            }
        }
        Ok(())
    }

    /// A setting outside of every section: for each subcommand that has it. A section says it more exactly,
    /// whatever the order in the file.
    fn everywhere(&mut self, file: &Path, key: &str, value: &Value) -> Result<()> {
        let names: Vec<String> = self.command.get_subcommands().map(|s| s.get_name().to_string()).collect();
        let mut known = false;
        for name in names {
            let said_in_section = self.origin.get(&setting(&name, key)).is_some_and(|f| f == file);
            known |= said_in_section || self.set(file, &name, key, value)?;
        }
        if known { Ok(()) } else { Err(unknown(file, key, &why_unknown(key))) }
    }

    /// False where the subcommand has no such setting.
    fn set(&mut self, file: &Path, subcommand: &str, key: &str, value: &Value) -> Result<bool> {
        let command = self.command.find_subcommand(subcommand).expect("asked with names of subcommands");
        let Some(arg) = command.get_arguments().find(|a| setting_name(a) == Some(key)) else {
            return Ok(false);
        };
        let (id, is_switch) = (arg.get_id().clone(), matches!(arg.get_action(), ArgAction::SetTrue));
        let takes_list = arg.get_value_delimiter().is_some() || matches!(arg.get_action(), ArgAction::Append);
        let fits = takes_list || !matches!(value, Value::Array(_));
        let values = words(value, is_switch).filter(|_| fits).ok_or_else(|| {
            unknown(file, key, if is_switch { "wants true or false" } else { "wants one value" })
        })?;
        let command = std::mem::take(&mut self.command);
        self.command = command.mut_subcommand(subcommand, |c| c.mut_arg(id, |a| a.default_values(values)));
        self.origin.insert(setting(subcommand, key), file.to_path_buf());
        Ok(true)
    }

    /// Where the value of a setting came from, if neither the command line nor a variable gave it.
    pub fn file_of(&self, subcommand: &str, key: &str) -> Option<&Path> {
        let variable = format!("LODE_{}", key.replace('-', "_").to_ascii_uppercase());
        match std::env::var_os(variable).filter(|value| !value.is_empty()) {
            Some(_) => None,
            None => self.origin.get(&setting(subcommand, key)).map(PathBuf::as_path),
        }
    }
}

fn setting(subcommand: &str, key: &str) -> String {
    format!("{subcommand}.{key}")
}

/// A value as the command line would have it; none where its type does not fit.
fn words(value: &Value, is_switch: bool) -> Option<Vec<String>> {
    match value {
        Value::Boolean(on) if is_switch => Some(vec![on.to_string()]),
        _ if is_switch => None,
        Value::String(text) => Some(vec![text.clone()]),
        Value::Integer(number) => Some(vec![number.to_string()]),
        Value::Array(values) => {
            values.iter().map(|v| words(v, false).filter(|w| w.len() == 1).map(|mut w| w.remove(0))).collect()
        }
        _ => None,
    }
}

fn why_unknown(key: &str) -> String {
    match key {
        "force" | "recursive" | "repair" => format!("--{key} must be said on the command line"),
        _ => "no flag has this name".to_string(),
    }
}

fn unknown(file: &Path, what: &str, why: &str) -> Failure {
    Failure::usage(format_args!("{}: {what}: {why}", show(file)))
}

/// As if one file said this.
#[cfg(test)]
pub fn of_text(text: &str) -> Configured {
    tests::configured(text).unwrap_or_else(|_| panic!("{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli;

    pub fn configured(text: &str) -> Result<Configured> {
        let mut c = Configured { command: cli::command(), origin: HashMap::new() };
        c.merge(Path::new("f.toml"), &text.parse().unwrap())?;
        Ok(c)
    }

    fn mkfs_size(c: &Configured, line: &[&str]) -> Option<u64> {
        let matches = c.command.clone().try_get_matches_from(line).unwrap();
        matches.subcommand_matches("mkfs").unwrap().get_one::<u64>("size").copied()
    }

    #[test]
    fn a_flag_beats_the_file() {
        let c = configured("[mkfs]\nsize = \"8G\"").unwrap();
        assert_eq!(mkfs_size(&c, &["lode", "mkfs", "p"]), Some(8 << 30));
        assert_eq!(mkfs_size(&c, &["lode", "mkfs", "p", "--size", "1G"]), Some(1 << 30));
    }

    #[test]
    fn a_section_beats_the_top_in_any_order() {
        // Tables are read in the order of their keys: `data` stands before `mkfs`, `size` behind it.
        let c =
            configured("data = \"cow\"\nsize = \"1G\"\n[mkfs]\nsize = \"8G\"\ndata = \"inplace\"").unwrap();
        assert_eq!(mkfs_size(&c, &["lode", "mkfs", "p"]), Some(8 << 30));
        let matches = c.command.clone().try_get_matches_from(["lode", "mkfs", "p"]).unwrap();
        let data = matches.subcommand_matches("mkfs").unwrap().get_one::<cli::Data>("data").copied();
        assert_eq!(data, Some(cli::Data::Inplace));
    }

    #[test]
    fn the_second_file_beats_the_first() {
        let mut c = configured("[mkfs]\nsize = \"8G\"").unwrap();
        c.merge(Path::new("g.toml"), &"size = \"2G\"".parse().unwrap()).unwrap();
        assert_eq!(mkfs_size(&c, &["lode", "mkfs", "p"]), Some(2 << 30));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, said) in [
            ("sizze = 1", "no flag has this name"),
            ("[mkfz]\nsize = 1", "no subcommand"),
            ("[rm]\nforce = true", "on the command line"),
            ("[info]\njson = \"maybe\"", "wants true or false"),
            ("[mkfs]\nsize = 1.5", "wants one value"),
            ("[mkfs]\nsize = [\"1G\", \"2G\"]", "wants one value"),
        ] {
            match configured(text) {
                Err(Failure::Usage(message)) => assert!(message.contains(said), "{text}: {message}"),
                other => panic!("{text}: {:?}", other.map(|_| ())),
            }
        }
    }
}
