//! `lode mount POOL DIR`: the command line of the mount; and what the environment and the configuration say to a mount helper.

use std::ffi::OsString;

use clap::ArgMatches;
use clap::parser::ValueSource;
use lodestone::mover::class::Class;

use crate::cli;
use crate::failure::{Failure, Result};
use crate::mount::MountOptions;

/// `args.options` are all that was asked for: see [`words`].
pub fn run(args: cli::Mount) -> Result<()> {
    let cli::Mount { pool, dir, options, foreground, .. } = args;
    let request = MountOptions { pool, dir, options, foreground, ..MountOptions::default() };
    Err(Failure::Ended(crate::mount::run(request)))
}

/// All settings as mount options, of which later ones win: what files say, what the environment says, and what is said on the command
/// line; of each first the options themselves.
pub fn words(args: &cli::Mount, matches: &ArgMatches) -> Vec<OsString> {
    let word = |name: &str, value: &dyn std::fmt::Display| OsString::from(format!("{name}={value}"));
    let class = args.class.map(|class| match class {
        Class::Bandwidth(owner) => format!("bandwidth:{}", owner.id()),
        class => class.name().to_owned(),
    });
    let profile = args.profile.as_ref().map(|profile| {
        let mut option = OsString::from("profile=");
        option.push(profile);
        option
    });
    let settings = [
        ("assume", args.assume.map(|assume| word("assume", &assume.domain()))),
        ("engine", args.engine.map(|engine| word("engine", &engine))),
        ("class", class.map(|class| word("class", &class))),
        ("profile", profile),
        ("metrics", args.metrics.as_ref().map(|address| word("metrics", address))),
    ];
    let options = args.options.iter().map(|option| ("options", option.clone()));
    let mut all: Vec<(&str, OsString)> =
        options.chain(settings.into_iter().filter_map(|(name, word)| Some((name, word?)))).collect();
    all.sort_by_key(|(name, _)| match matches.value_source(name) {
        Some(ValueSource::CommandLine) => 2,
        Some(ValueSource::EnvVariable) => 1,
        _ => 0,
    });
    all.into_iter().map(|(_, word)| word).collect()
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    fn said(line: &str, file: &str) -> String {
        let configured = crate::config::of_text(file);
        let matches = configured.command.try_get_matches_from(line.split_whitespace()).unwrap();
        let matches = matches.subcommand_matches("mount").unwrap();
        let words = words(&cli::Mount::from_arg_matches(matches).unwrap(), matches);
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_is_said_on_the_command_line_wins_however_it_is_said() {
        let file = "[mount]\nengine = \"emu\"\noptions = \"assume=memory\"";
        assert_eq!(said("lode mount p d -o engine=cpu", ""), "engine=cpu");
        assert_eq!(said("lode mount p d -o engine=cpu", file), "engine=emu engine=cpu");
        assert_eq!(said("lode mount p d", file), "assume=memory engine=emu");
        assert_eq!(
            said("lode mount p d --engine delegate --assume page-cache", file),
            "assume=memory assume=page-cache engine=delegate"
        );
        assert_eq!(said("lode mount p d -o ro -o engine=cpu --engine emu", ""), "ro engine=cpu engine=emu");
    }
}
