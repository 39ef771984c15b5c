//! Gives the shared library its soname: programs linked against it ask for this major version.

fn main() {
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").expect("cargo sets it");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,liblodestone.so.{major}");
    println!("cargo:rerun-if-changed=build.rs");
}
