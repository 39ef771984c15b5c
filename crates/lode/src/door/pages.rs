//! Pages that the kernel has to forget because others than it store to them: those of fixed files, which somebody has mapped
//! past the mount. And those that it has to write before something is said of them.
//!
//! On a thread of its own: the kernel waits there for pages that a request is to fill, and perhaps nobody is left to answer that
//! request but who asked.

use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
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
    /// Told when the kernel has done it.
    done: Option<SyncSender<()>>,
}

impl Pages {
    pub fn new(kernel: Arc<OnceLock<Notifier>>) -> Pages {
        Pages { kernel, told: OnceLock::new() }
    }

    /// Soon after this the kernel asks again for what it has from `offset` on; for all of it where `bytes` is 0.
    pub fn forget(&self, node: INodeNo, offset: u64, bytes: u32) {
        self.tell(Range { node, offset: offset as i64, bytes: i64::from(bytes), done: None });
    }

    /// Waits until the kernel has written what programs stored to these bytes through mappings, by requests that another thread
    /// has to take. False where it could not be asked.
    pub fn write_back(&self, node: INodeNo, bytes: std::ops::Range<u64>) -> bool {
        let (done, is_done) = sync_channel(1);
        let length = (bytes.end - bytes.start) as i64;
        self.tell(Range { node, offset: bytes.start as i64, bytes: length, done: Some(done) });
        is_done.recv().is_ok()
    }

    fn tell(&self, range: Range) {
        if let Some(told) = self.told.get_or_init(|| begin(Arc::clone(&self.kernel))) {
            // Fails where the thread panicked, which was said then.
            let _ = told.send(range);
        }
    }
}

/// The thread ends with the last who tells it anything.
fn begin(kernel: Arc<OnceLock<Notifier>>) -> Option<Sender<Range>> {
    let (tell, told) = channel::<Range>();
    let forget = move || {
        for Range { node, offset, bytes, done } in told {
            match (kernel.get().map(|kernel| kernel.inval_inode(node, offset, bytes)), done) {
                (Some(Err(e)), _) => {
                    error!(inode = node.0, error = %e, "the kernel keeps pages of a file that others store to");
                }
                // Who waits may have gone.
                (Some(Ok(())), Some(done)) => _ = done.send(()),
                _ => {}
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
