//! `lode wsp`: whole systems in QEMU, suspended and resumed in milliseconds (see `lodestone::wsp`).
//!
//! | file | owns |
//! |---|---|
//! | `place` | where a guest is described, who may change it, whether it runs |
//! | `emulator` | QEMU's command line, and which way of executing works |
//! | `qmp`, `agent` | what is said to QEMU, and to a program in the guest |
//! | `identity` | what must be the same when a state is loaded |
//! | `guest` | the steps of a suspend and a resume in QEMU |
//! | `start`, `suspend`, `resume`, `end`, `status`, `daemon` | one command each |
//! | `reflink` | a copy of a suspended guest that shares its blocks |
//! | `pooled` | memory that is a file of a pool |
//! | `touched` | which parts of memory are written back |
//! | `turns`, `window` | who is suspended when, and how far all are when the energy was to end |
//! | `report` | how long it took, by phase, and what was written back |

mod agent;
mod daemon;
mod emulator;
mod end;
mod guest;
mod identity;
mod place;
mod pooled;
mod qmp;
mod reflink;
mod report;
mod resume;
mod start;
mod status;
mod suspend;
mod touched;
mod turns;
mod window;

use crate::cli::wsp::{Wsp, WspSub};
use crate::failure::Result;

pub fn run(args: &Wsp) -> Result<()> {
    let guests = place::Guests::new(args.dir.as_deref())?;
    match &args.command {
        WspSub::Start(args) => start::run(&guests, args),
        WspSub::Suspend(args) => suspend::run(&guests, args),
        WspSub::Resume(args) => resume::run(&guests, args),
        WspSub::List(args) => status::list(&guests, args),
        WspSub::Status(args) => status::status(&guests, args),
        WspSub::Stop(args) => end::stop(&guests, args),
        WspSub::Rm(args) => end::rm(&guests, args),
        WspSub::Daemon(args) => daemon::run(&guests, args),
    }
}
