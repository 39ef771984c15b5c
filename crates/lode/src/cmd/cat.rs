//! `lode cat POOL:/path ...`: file contents to standard output.

use crate::cli;
use crate::failure::{Failure, Output, Result, complain, reason, remedy};
use crate::pool::{Access, Pools};
use crate::target::PoolPath;
use crate::tree::{Tree, check_length};

/// One read, in bytes: large enough for the parallel streams of a media read.
const CHUNK_BYTES: usize = 1 << 20;

pub fn run(args: &cli::Cat) -> Result<()> {
    let mut pools = Pools::new();
    for path in &args.paths {
        pools.open(&path.pool, Access::Read)?;
    }
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut failures = 0;
    let printed = Output::print(|out| {
        for path in &args.paths {
            let tree = pools.tree(&path.pool);
            if let Err(e) = write(tree, path, out, &mut buffer)? {
                complain(format_args!("cannot read {path}: {}{}", reason(&e), remedy(e.errno())));
                failures += 1;
            }
        }
        Ok(())
    });
    pools.close()?;
    printed?;
    if failures == 0 { Ok(()) } else { Err(Failure::Reported) }
}

/// The outer result is standard output's, the inner the file's.
fn write(
    tree: &dyn Tree,
    path: &PoolPath,
    out: &mut Output,
    buffer: &mut [u8],
) -> Result<lodestone::Result<()>> {
    let open = || {
        check_length(&path.path)?;
        let file = tree.open(&path.path)?;
        match file.stat()?.kind {
            lodestone::fs::Kind::File => Ok(file),
            lodestone::fs::Kind::Directory => Err(lodestone::Error::new(libc::EISDIR, "lode::cat")),
            _ => Err(lodestone::Error::message(libc::EINVAL, "lode::cat", "it is no regular file")),
        }
    };
    let file = match open() {
        Ok(file) => file,
        Err(e) => return Ok(Err(e)),
    };
    let mut offset = 0;
    loop {
        match file.read(offset, buffer) {
            Ok(0) => return Ok(Ok(())),
            Ok(n) => {
                out.bytes(&buffer[..n])?;
                offset += n as u64;
            }
            Err(e) => return Ok(Err(e)),
        }
    }
}
