//! `lode top TARGET`: the command line of the live screen.

use crate::cli;
use crate::failure::Result;
use crate::top::TopOptions;

pub fn run(args: &cli::Top) -> Result<()> {
    crate::top::run(&TopOptions {
        target: args.target.clone(),
        interval: args.interval,
        once: args.once,
        json: args.json,
    })
}
