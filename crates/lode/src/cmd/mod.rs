//! One file per subcommand. Each takes its part of the command line and ends in `Ok` or a `Failure`.

mod bench;
mod cat;
mod completions;
mod cost;
mod cp;
mod crash;
mod crash_heap;
mod dump;
mod fsck;
mod info;
mod ls;
mod man;
mod mkfs;
pub mod mount;
mod rm;
mod run;
mod top;
mod tune;
mod umount;

pub use ls::utc;

use crate::cli::Sub;
use crate::failure::Result;

pub fn run(command: Sub) -> Result<()> {
    match command {
        Sub::Mkfs(args) => mkfs::run(&args),
        Sub::Info(args) => info::run(&args),
        Sub::Mount(args) => mount::run(args),
        Sub::Umount(args) => umount::run(&args),
        Sub::Top(args) => top::run(&args),
        Sub::Ls(args) => ls::run(&args),
        Sub::Cat(args) => cat::run(&args),
        Sub::Cp(args) => cp::run(&args),
        Sub::Rm(args) => rm::run(&args),
        Sub::Fsck(args) => fsck::run(&args),
        Sub::Dump(args) => dump::run(&args),
        Sub::Run(args) => run::run(args),
        Sub::Bench(args) => bench::run(args),
        Sub::Cost(args) => cost::run(args),
        Sub::Tune(args) => tune::run(args),
        Sub::Crash(args) => crash::run(&args),
        Sub::Wsp(args) => crate::wsp::run(&args),
        Sub::Completions(args) => completions::run(&args),
        Sub::Man(args) => man::run(&args),
    }
}
