//! `lode mount POOL DIR`: the command line of the mount.

use std::ffi::OsString;

use lodestone::mover::class::Class;

use crate::cli;
use crate::failure::{Failure, Result};
use crate::mount::MountOptions;

pub fn run(args: cli::Mount) -> Result<()> {
    let mut options = args.options;
    if let Some(assume) = args.assume {
        options.push(OsString::from(format!("assume={}", assume.domain())));
    }
    if let Some(engine) = args.engine {
        options.push(OsString::from(format!("engine={engine}")));
    }
    match args.class {
        Some(Class::Bandwidth(owner)) => {
            options.push(OsString::from(format!("class=bandwidth:{}", owner.id())));
        }
        Some(class) => options.push(OsString::from(format!("class={}", class.name()))),
        None => {}
    }
    if let Some(profile) = args.profile {
        let mut option = OsString::from("profile=");
        option.push(profile);
        options.push(option);
    }
    if let Some(address) = args.metrics {
        options.push(OsString::from(format!("metrics={address}")));
    }
    let (pool, dir, foreground) = (args.pool, args.dir, args.foreground);
    let request = MountOptions { pool, dir, options, foreground, ..MountOptions::default() };
    Err(Failure::Ended(crate::mount::run(request)))
}
