//! Gives the shared library its soname: programs linked against it ask for this major version. And a link of that name
//! beside the library, so that those which were linked with it there, without installing it, find it at run time.

use std::os::unix::fs::symlink;
use std::path::Path;

fn main() {
    let of = |name: &str| std::env::var(name).expect("cargo sets it");
    let soname = format!("liblodestone.so.{}", of("CARGO_PKG_VERSION_MAJOR"));
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    // A program may have a jemalloc of its own, with options of that name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
    // The directory of the profile: build/PACKAGE/out is below it. Where cargo has another layout, or the link is there,
    // nothing is lost: an installed library has its own.
    if let Some(dir) = Path::new(&of("OUT_DIR")).ancestors().nth(3) {
        let _ = symlink("liblodestone.so", dir.join(soname));
    }
}
