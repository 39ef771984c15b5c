//! `lode umount DIR`: detaches a mounted pool and waits until it is closed.

use crate::cli;
use crate::failure::{Failure, Result};

pub fn run(args: &cli::Umount) -> Result<()> {
    Err(Failure::Ended(crate::mount::umount(&args.dir)))
}
