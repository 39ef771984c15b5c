//! `lode cost`: the command line of the measure of CPU time and energy.

use crate::cli;
use crate::cost::CostOptions;
use crate::failure::{Output, Result};
use crate::outfile;

pub fn run(args: cli::Cost) -> Result<()> {
    args.svg.iter().try_for_each(|picture| outfile::refuse_place(picture))?;
    let text = crate::cost::run(&CostOptions {
        command: args.command,
        runs: args.runs,
        idle: args.idle,
        bytes: args.bytes,
        pool: args.pool,
        block: args.block,
        meter: args.meter,
        json: args.json,
        svg: args.svg,
    })?;
    let mut out = Output::new();
    out.bytes(text.as_bytes())?;
    out.finish()
}
