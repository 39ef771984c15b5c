//! The `lode` command: reads the command line, runs one subcommand, turns its end into an exit code.
//!
//! `cli` defines what can be said, `config` adds what files say, `cmd` does it, `failure` is the one way out.
//! Called as `mount.lode` or `mount.fuse.lode` (by mount(8), from fstab) the binary is the mount helper.

mod allocator;
mod bench;
mod cli;
mod cmd;
mod config;
mod cost;
mod door;
mod failure;
mod interrupt;
mod live;
mod machine;
mod mount;
mod outfile;
mod pool;
mod profile;
mod progress;
mod size;
mod svg;
mod target;
mod top;
mod tree;
mod tune;
mod wsp;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use clap::FromArgMatches;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use config::Configured;
use failure::{Failure, Output, Result};

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    interrupt::outlive_large_files();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(arguments: &[OsString]) -> Result<()> {
    let is_subcommand = |word: &str| cli::command().find_subcommand(word).is_some();
    if let Some(request) = mount::options::helper(arguments, is_subcommand) {
        start_log(LOG_DEFAULT)?;
        return Err(Failure::Ended(mount::run(with_settings(request.map_err(Failure::Usage)?)?)));
    }
    let configured = match config::apply(cli::command(), arguments) {
        // Help is had whatever the configuration says: perhaps that is what it is wanted for.
        Err(wrong) => match cli::command().try_get_matches_from(arguments) {
            Err(e) if e.exit_code() == 0 => return print_help(&e),
            _ => return Err(wrong),
        },
        configured => configured?,
    };
    match configured.command.clone().try_get_matches_from(arguments) {
        Ok(matches) => {
            let mut cli =
                cli::Cli::from_arg_matches(&matches).map_err(|e| usage(&e, &configured, arguments))?;
            if let (cli::Sub::Mount(args), Some(matches)) =
                (&mut cli.command, matches.subcommand_matches("mount"))
            {
                args.options = cmd::mount::words(args, matches);
            }
            start_log(if matches!(cli.command, cli::Sub::Crash(_)) { LOG_SIMULATED } else { LOG_DEFAULT })?;
            cmd::run(cli.command)
        }
        Err(e) if e.exit_code() == 0 => print_help(&e),
        Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let help = subcommand(arguments).map_or(String::new(), |name| format!("{name} "));
            Err(Failure::usage(format_args!("a command is missing; see lode {help}--help")))
        }
        Err(e) => Err(usage(&e, &configured, arguments)),
    }
}

/// What a mount helper was asked for, behind what the environment and the configuration say of mounts.
fn with_settings(mut request: mount::MountOptions) -> Result<mount::MountOptions> {
    let words: [&OsStr; 5] =
        ["lode".as_ref(), "mount".as_ref(), "--".as_ref(), &request.pool, request.dir.as_os_str()];
    let arguments = words.map(OsString::from);
    let configured = config::apply(cli::command(), &arguments)?;
    let wrong = |e: clap::Error| usage(&e, &configured, &arguments);
    let matches = configured.command.clone().try_get_matches_from(&arguments).map_err(wrong)?;
    let matches = matches.subcommand_matches("mount").expect("it was just given");
    let settings = cmd::mount::words(&cli::Mount::from_arg_matches(matches).map_err(wrong)?, matches);
    request.options.splice(0..0, settings);
    Ok(request)
}

/// What is logged unless `LODE_LOG` asks for something: warnings, without the replies that nobody wanted any more
/// because the calling process was interrupted.
const LOG_DEFAULT: &str = "warn,fuser::reply=off";
/// The same where pools are simulated: that they are damaged is what was asked for.
const LOG_SIMULATED: &str = "off";

/// Events of the library go to stderr: warnings as `lode: warning: ...`, or what `LODE_LOG` asks for (EnvFilter
/// syntax), with time and place. Never in colours: a mount's go on to the system log.
fn start_log(default: &str) -> Result<()> {
    // A reader of stderr that has gone is no reason to panic, which reporting a failed write would do.
    let log =
        tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false).with_ansi(false);
    let Some(text) = std::env::var("LODE_LOG").ok().filter(|text| !text.is_empty()) else {
        log.event_format(Plain).with_env_filter(EnvFilter::new(default)).init();
        return Ok(());
    };
    let filter = EnvFilter::try_new(&text).map_err(|e| {
        Failure::usage(format_args!(
            "LODE_LOG={text}: {e}; write a level (info) or targets (lodestone=debug)"
        ))
    })?;
    log.with_env_filter(filter).init();
    Ok(())
}

/// An event as people want it who have not asked for events.
struct Plain;

impl<S, N> FormatEvent<S, N> for Plain
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = if *event.metadata().level() == tracing::Level::ERROR { "error" } else { "warning" };
        write!(to, "lode: {level}: ")?;
        ctx.field_format().format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}

fn print_help(help: &clap::Error) -> Result<()> {
    let mut out = Output::new();
    out.bytes(help.render().to_string().as_bytes())?;
    out.finish()
}

/// How to ask for the help of a command, or of one below it.
fn help_of(command: &clap::Command, name: &str, arguments: &[OsString]) -> String {
    let behind = arguments.iter().skip_while(|word| *word != name).skip(1);
    let below =
        command.find_subcommand(name).and_then(|it| behind.filter_map(|w| it.find_subcommand(w)).next());
    format!("lode {name} {}--help", below.map_or(String::new(), |it| format!("{} ", it.get_name())))
}

/// A command-line error on one line, with the place of the value where that is not the command line.
fn usage(e: &clap::Error, configured: &Configured, arguments: &[OsString]) -> Failure {
    let text = e.render().to_string();
    let message: Vec<&str> = text.lines().take_while(|l| !l.trim().is_empty()).map(str::trim).collect();
    let message = message.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    let tips = text.lines().filter_map(|l| l.trim().strip_prefix("tip: "));
    let tip = tips.filter(|t| t.contains("similar")).map(|t| format!("; {t}")).next();
    let subcommand = subcommand(arguments).filter(|name| configured.command.find_subcommand(name).is_some());
    let from = subcommand.and_then(|name| origin(e, configured, name, arguments));
    let help =
        subcommand.map_or("lode --help".to_string(), |name| help_of(&configured.command, name, arguments));
    Failure::usage(format_args!(
        "{message}{}{}; see {help}",
        from.unwrap_or_default(),
        tip.unwrap_or_default()
    ))
}

/// The first word that is neither an option nor the file that `--config` names; none where that is no text.
fn subcommand(arguments: &[OsString]) -> Option<&str> {
    let mut words = arguments.iter().skip(1);
    while let Some(word) = words.next() {
        if word == "--config" {
            words.next();
        } else if !word.as_encoded_bytes().starts_with(b"-") {
            return word.to_str();
        }
    }
    None
}

/// ` (from FILE)` or ` (from LODE_X)` where a refused value was not given on the command line.
fn origin(
    e: &clap::Error,
    configured: &Configured,
    subcommand: &str,
    arguments: &[OsString],
) -> Option<String> {
    let Some(ContextValue::String(arg)) = e.get(ContextKind::InvalidArg) else { return None };
    let name = arg.strip_prefix("--")?.split([' ', '=']).next()?;
    let flag = format!("--{name}");
    let given = |a: &OsString| {
        let rest = a.as_encoded_bytes().strip_prefix(flag.as_bytes());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"="))
    };
    if arguments.iter().any(given) {
        return None;
    }
    let file = |f: &Path| format!(" (from {})", target::show(f));
    let variable = || format!(" (from LODE_{})", name.replace('-', "_").to_ascii_uppercase());
    Some(configured.file_of(subcommand, name).map_or_else(variable, file))
}
