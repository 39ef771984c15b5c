//! `lode dump POOL [INO]`: what stands on media, decoded.
//!
//! The pool is recovered in a private copy first, so that what is shown is what counts.

use lodestone::fs::Ino;

use crate::cli;
use crate::failure::{Failure, Output, Result, reason};
use crate::pool::{Access, Pools};
use crate::target::show;

pub fn run(args: &cli::Dump) -> Result<()> {
    let mut pools = Pools::new();
    pools.open(&args.pool, Access::Read)?;
    let fs = &pools.tree(&args.pool).fs;
    let text = match args.ino {
        None => fs.dump_super(),
        Some(ino) => fs.dump_inode(Ino(ino)).map_err(|e| {
            let pool = show(args.pool.as_ref());
            match e.errno() {
                libc::ENOENT => Failure::failed(format_args!("{pool} has no inode {ino}")),
                _ => Failure::failed(format_args!("cannot dump inode {ino} of {pool}: {}", reason(&e))),
            }
        })?,
    };
    let mut out = Output::new();
    out.bytes(text.as_bytes())?;
    out.finish()?;
    pools.close()
}
