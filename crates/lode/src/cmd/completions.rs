//! `lode completions SHELL`: what a shell needs to complete every subcommand and flag.

use crate::cli;
use crate::failure::{Output, Result};

pub fn run(args: &cli::Completions) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut cli::command(), "lode", &mut text);
    let mut out = Output::new();
    out.bytes(&text)?;
    out.finish()
}
