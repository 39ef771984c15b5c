//! `include/lodestone.h` says what the sources say.
//!
//! After a change of the interface: `LODE_UPDATE_HEADER=1 cargo test -p lodestone-capi --test header`.

use std::path::Path;

/// The order in which the header presents the interface.
const SOURCES: [&str; 12] = [
    "pools", "file", "tickets", "names", "attrs", "xattr", "dir", "media", "heap", "memory", "uthread",
    "failure",
];

fn generate(root: &Path) -> String {
    let config =
        cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("the configuration is readable");
    let builder = SOURCES.iter().fold(cbindgen::Builder::new().with_config(config), |builder, name| {
        builder.with_src(root.join("src").join(name).with_extension("rs"))
    });
    let mut header = Vec::new();
    builder.generate().expect("the sources are readable").write(&mut header);
    String::from_utf8(header).expect("C is ASCII")
}

#[test]
fn the_header_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("include/lodestone.h");
    let header = generate(root);
    if std::env::var_os("LODE_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &header).expect("the header is writable");
    }
    let committed = std::fs::read_to_string(&path).expect("the header is there");
    assert!(committed == header, "lodestone.h is stale: see the head of this file");
}

#[test]
fn every_exported_function_is_declared_and_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = generate(root);
    let mut functions = 0;
    for entry in std::fs::read_dir(root.join("src")).unwrap() {
        let source = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for rest in source.split("extern \"C\" fn lode_").skip(1) {
            let name = format!("lode_{}", &rest[..rest.find('(').unwrap()]);
            let declares =
                |line: &str| [" ", "*"].iter().any(|before| line.contains(&format!("{before}{name}(")));
            let commented = header.lines().zip(header.lines().skip(1));
            let found = commented.filter(|(above, line)| *above == " */" && declares(line)).count();
            assert_eq!(found, 1, "{name} is declared once, with a comment");
            functions += 1;
        }
    }
    assert!(functions > 60, "only {functions} functions were found");
}
