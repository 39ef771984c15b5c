//! stub
pub fn run(_: &crate::cli::Dump) -> crate::failure::Result<()> {
    todo!()
}
