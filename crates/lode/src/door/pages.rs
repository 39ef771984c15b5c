//! Pages that the kernel has to forget because others than it store to them: those of fixed files, which somebody has mapped
//! past the mount.
//!
//! On a thread of its own: the kernel waits there for pages that a request is to fill, and perhaps nobody is left to answer that
//! request but who asked.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use fuser::{INodeNo, Notifier};
use tracing::error;

pub struct Pages {
    /// The way back to the kernel, once there is one.
    kernel: Arc<OnceLock<Notifier>>,
    /// From the first on; none where no thread could be had.
    told: OnceLock<Option<Sender<Range>>>,
}

struct Range {
    node: INodeNo,
    offset: i64,
    /// 0: to the end.
    bytes: i64,
}

impl Pages {
    pub fn new(kernel: Arc<OnceLock<Notifier>>) -> Pages {
        Pages { kernel, told: OnceLock::new() }
    }

    /// Soon after this the kernel asks again for what it has from `offset` on; for all of it where `bytes` is 0.
    pub fn forget(&self, node: INodeNo, offset: u64, bytes: u32) {
        if let Some(told) = self.told.get_or_init(|| begin(Arc::clone(&self.kernel))) {
            // Fails where the thread panicked, which was said then.
            let _ = told.send(Range { node, offset: offset as i64, bytes: i64::from(bytes) });
        }
    }
}

/// The thread ends with the last who tells it anything.
fn begin(kernel: Arc<OnceLock<Notifier>>) -> Option<Sender<Range>> {
    let (tell, told) = channel::<Range>();
    let forget = move || {
        for Range { node, offset, bytes } in told {
            if let Some(Err(e)) = kernel.get().map(|kernel| kernel.inval_inode(node, offset, bytes)) {
                error!(inode = node.0, error = %e, "the kernel keeps pages of a file that others store to");
            }
        }
    };
    match thread::Builder::new().name("lode-forget".to_owned()).spawn(forget) {
        Ok(_) => Some(tell),
        Err(e) => {
            error!(error = %e, "no thread to tell the kernel of files that others store to: it keeps their pages");
            None
        }
    }
}
