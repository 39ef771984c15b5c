//! `lode bench`: the command line of the bench.

use crate::bench::BenchOptions;
use crate::cli;
use crate::failure::{Output, Result};

pub fn run(args: cli::Bench) -> Result<()> {
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
        pool: args.pool,
        rounds: args.rounds,
        mount: args.mount,
        breakdown: args.breakdown,
    })?;
    let mut out = Output::new();
    out.bytes(text.as_bytes())?;
    out.finish()
}
