//! `lode man DIR`: the manual, one page per subcommand, made from the definition of the command line.
//!
//! To what clap knows, each page adds examples, exit status, environment and files.

use std::fs;
use std::path::Path;

use clap::{ArgAction, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use crate::cli;
use crate::failure::{Failure, Result};
use crate::outfile;
use crate::target::show;

pub fn run(args: &cli::Man) -> Result<()> {
    let failed = |path: &Path, e: std::io::Error| {
        Failure::failed(format_args!("cannot write the man page {}: {e}", show(path)))
    };
    fs::create_dir_all(&args.dir).map_err(|e| failed(&args.dir, e))?;
    for (name, text) in pages() {
        let path = args.dir.join(name);
        outfile::write(&path, "the man page", text)?;
    }
    Ok(())
}

/// File names and texts.
fn pages() -> Vec<(String, Vec<u8>)> {
    let mut root = cli::command();
    root.build();
    let mut pages = Vec::new();
    for sub in root.get_subcommands() {
        let name = format!("lode-{}", sub.get_name());
        for below in sub.get_subcommands().filter(|below| below.get_name() != "help") {
            let name = format!("{name}-{}", below.get_name());
            let text = page(below.clone().name(name.clone()).display_name(name.clone()), sub.get_name());
            pages.push((format!("{name}.1"), text));
        }
        pages.push((
            format!("{name}.1"),
            page(sub.clone().name(name.clone()).display_name(name), sub.get_name()),
        ));
    }
    pages.push(("lode.1".to_string(), page(root, "")));
    pages
}

fn page(command: Command, subcommand: &str) -> Vec<u8> {
    let extra = extra_sections(&command, subcommand);
    let lists = command.has_subcommands();
    // The examples get a section of their own.
    // The date is an argument of its own, though there is none: else what follows would stand one place further ahead.
    let man = Man::new(command.after_long_help(None::<&str>)).date("\"\"").manual("Lodestone Manual");
    let mut text = Vec::new();
    let written = man
        .render_title(&mut text)
        .and_then(|()| man.render_name_section(&mut text))
        .and_then(|()| man.render_synopsis_section(&mut text))
        .and_then(|()| man.render_description_section(&mut text))
        .and_then(|()| man.render_options_section(&mut text))
        .and_then(|()| if lists { man.render_subcommands_section(&mut text) } else { Ok(()) })
        .and_then(|()| extra.to_writer(&mut text));
    written.expect("writing to memory cannot fail");
    text
}

fn extra_sections(command: &Command, subcommand: &str) -> Roff {
    let mut roff = Roff::new();
    let examples = cli::examples(subcommand);
    if !examples.is_empty() {
        roff.control("SH", ["EXAMPLES"]);
        for (what, line) in examples {
            roff.control("TP", []).text([roman(format!("{what}:"))]).text([bold(*line)]);
        }
    }
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in exit_codes(subcommand) {
        item(&mut roff, bold(*code), meaning);
    }
    roff.control("SH", ["ENVIRONMENT"]);
    roff.text([roman("A variable that is empty counts as unset.")]);
    for (variable, meaning) in environment(command) {
        item(&mut roff, bold(variable), &meaning);
    }
    roff.control("SH", ["FILES"]);
    item(
        &mut roff,
        bold("/etc/lode.toml, ~/.config/lode/config.toml"),
        "Settings in TOML, with the names of the flags: outside of sections for every subcommand that has \
         the flag, in a section like [mkfs] for one. A flag beats the environment, the environment the files, \
         the second file the first.",
    );
    item(
        &mut roff,
        bold("~/.config/lode/profile.toml, /etc/lode/profile.toml"),
        "What engines are worth on this machine, as lode tune wrote it; the first that is there. LODE_PROFILE names \
         another.",
    );
    roff.control("SH", ["SEE ALSO"]);
    let others = cli::command();
    let others = others.get_subcommands().map(|s| s.get_name()).filter(|n| *n != subcommand);
    let mut names: Vec<String> = others.map(|n| format!("lode-{n}(1)")).collect();
    if !subcommand.is_empty() {
        names.insert(0, "lode(1)".to_string());
    }
    roff.text([roman(names.join(", "))]);
    roff
}

fn exit_codes(subcommand: &str) -> &'static [(&'static str, &'static str)] {
    match subcommand {
        "fsck" => &[
            ("0", "Nothing is wrong."),
            ("1", "All that was wrong is repaired."),
            ("2", "The command line is wrong."),
            ("4", "Something is wrong that was not repaired."),
            ("8", "The pool could not be checked."),
        ],
        "run" => &[
            ("0", "CMD took the place of lode and ended so: its exit status is its own, whatever it is."),
            ("1", "The heap cannot be used as it was asked for; CMD was not run."),
            ("2", "The command line is wrong."),
            ("126", "CMD cannot be executed."),
            ("127", "There is no such CMD."),
        ],
        _ => &[("0", "Done."), ("1", "Failed."), ("2", "The command line is wrong.")],
    }
}

fn item(roff: &mut Roff, head: Inline, text: &str) {
    roff.control("TP", []).text([head]).text([roman(text)]);
}

fn environment(command: &Command) -> Vec<(String, String)> {
    let log = "Events on standard error: a level (error, warn, info, debug, trace) or targets with levels, as \
               in lodestone=debug.";
    let mut all = vec![("LODE_LOG".to_string(), log.to_string())];
    for arg in command.get_arguments() {
        if let (Some(variable), Some(name)) = (arg.get_env(), arg.get_long()) {
            let value = if matches!(arg.get_action(), ArgAction::SetTrue) { " (true or false)" } else { "" };
            all.push((variable.to_string_lossy().into_owned(), format!("As --{name}{value}.")));
        }
    }
    all
}
