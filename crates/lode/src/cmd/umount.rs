//! `lode umount DIR`: detaches a mounted pool and waits until it is closed.

use crate::cli;
use crate::failure::Result;

pub fn run(args: &cli::Umount) -> Result<()> {
    Ok(crate::mount::umount(&args.dir)?)
}
