//! What goes on in a mounted pool, told by its server to whoever asks (docs/top.md).
//!
//! `state` is the document that is told, `metrics` the same in Prometheus' words, `server` answers, `client` asks. Of
//! addresses `address` knows the two kinds, `listen` takes them, and `place` says where a mount server can be found without
//! one: `lode top POOL`.

pub mod address;
pub mod client;
pub mod listen;
pub mod metrics;
pub mod place;
pub mod server;
pub mod state;
