//! `lode tune`: the command line of the measure of engines.

use crate::cli;
use crate::failure::{Output, Result};
use crate::outfile;
use crate::tune::TuneOptions;

pub fn run(args: cli::Tune) -> Result<()> {
    args.svg.iter().try_for_each(|picture| outfile::refuse_place(picture))?;
    let text = crate::tune::run(&TuneOptions {
        pool: args.pool.map(Into::into),
        engines: args.engine,
        quick: args.quick,
        assume: args.assume.map(cli::Assume::domain),
        out: args.out,
        dry_run: args.dry_run,
        svg: args.svg,
        json: args.json,
    })?;
    let mut out = Output::new();
    out.bytes(text.as_bytes())?;
    out.finish()
}
