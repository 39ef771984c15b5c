//! `lode bench`: the command line of the bench.

use crate::bench::{BenchOptions, USAGE};
use crate::cli;
use crate::failure::{Failure, Output, Result, reason};
use crate::interrupt;
use crate::outfile;

pub fn run(args: cli::Bench) -> Result<()> {
    args.svg.iter().try_for_each(|picture| outfile::refuse_place(picture))?;
    interrupt::catch();
    let text = crate::bench::run(&BenchOptions {
        only: args.only,
        peers: args.peers,
        quick: args.quick,
        smoke: args.smoke,
        json: args.json,
        svg: args.svg,
        threads: args.threads,
        assume: args.assume.into_iter().map(cli::Assume::domain).collect(),
        engines: args.engine,
        profile: args.profile,
        pool: args.pool,
        rounds: args.rounds,
        mount: args.mount,
        breakdown: args.breakdown,
    })
    .map_err(|e| if e.site() == USAGE { Failure::usage(reason(&e)) } else { e.into() })?;
    let mut out = Output::new();
    out.bytes(text.as_bytes())?;
    out.finish()
}
