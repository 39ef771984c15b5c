//! Pages that the kernel has to forget because others than it store to them: those of fixed files, which somebody has mapped
//! past the mount. And those that it has to write before something is said of them.
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
    told: OnceLock<Option<Sender<Job>>>,
}

type Job = Box<dyn FnOnce(&Kernel) + Send>;

/// What may be asked of the kernel on the thread that waits for it.
pub struct Kernel(Notifier);

impl Kernel {
    /// Waits until the kernel has written what programs stored to these bytes through mappings, by requests that whoever serves
    /// has to take. False where it could not be asked.
    pub fn write_back(&self, node: INodeNo, bytes: std::ops::Range<u64>) -> bool {
        let length = (bytes.end - bytes.start) as i64;
        self.forget(node, bytes.start as i64, length)
    }

    fn forget(&self, node: INodeNo, offset: i64, bytes: i64) -> bool {
        let told = self.0.inval_inode(node, offset, bytes);
        if let Err(e) = &told {
            error!(inode = node.0, error = %e, "the kernel keeps pages of a file that others store to");
        }
        told.is_ok()
    }
}

impl Pages {
    pub fn new(kernel: Arc<OnceLock<Notifier>>) -> Pages {
        Pages { kernel, told: OnceLock::new() }
    }

    /// Soon after this the kernel asks again for what it has from `offset` on; for all of it where `bytes` is 0.
    pub fn forget(&self, node: INodeNo, offset: u64, bytes: u32) {
        // Where there is nobody to do it, that was said.
        let _ = self.ask(move |kernel| _ = kernel.forget(node, offset as i64, i64::from(bytes)));
    }

    /// Does on that thread what has to wait for the kernel. False where there is none, and then nothing is done.
    pub fn ask(&self, job: impl FnOnce(&Kernel) + Send + 'static) -> bool {
        let told = self.told.get_or_init(|| begin(Arc::clone(&self.kernel)));
        // Fails where the thread panicked.
        told.as_ref().is_some_and(|told| told.send(Box::new(job)).is_ok())
    }
}

/// The thread ends with the last who tells it anything.
fn begin(kernel: Arc<OnceLock<Notifier>>) -> Option<Sender<Job>> {
    let (tell, told) = channel::<Job>();
    let kernel = Kernel(kernel.get()?.clone());
    let forget = move || told.into_iter().for_each(|job| job(&kernel));
    match thread::Builder::new().name("lode-forget".to_owned()).spawn(forget) {
        Ok(_) => Some(tell),
        Err(e) => {
            error!(error = %e, "no thread to tell the kernel of files that others store to: it keeps their pages");
            None
        }
    }
}
