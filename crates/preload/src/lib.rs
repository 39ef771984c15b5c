//! liblode_preload.so: an unmodified program's memory on slow memory (`lode run --heap`).
//!
//! The library exports the names of the C library's allocator, and the dynamic linker takes it first (`LD_PRELOAD`). All memory is
//! jemalloc's; where it lies the environment says: `settings`. Without `LODE_HEAP` it lies in DRAM and nothing else happens.
//!
//! **Order of events.** The dynamic linker and the constructors of other libraries allocate before ours runs. They get DRAM from
//! jemalloc, which needs nothing of this library but the text of its options. Our constructor then opens the media; what it
//! allocates on the way is of the same kind. From then on jemalloc's own arenas take their extents from the media,
//! and `malloc` is jemalloc's without a step in between (with `LODE_HEAP_MIN`: one comparison).
//!
//! What runs inside of `malloc` allocates nothing, logs nothing and has no thread-local variables but jemalloc's. A panic
//! does not leave: the functions are `extern "C"`, and abort.
//!
//! Files: `allocator` the names, `settings` the environment, `report` what is said at the end, `process` fork.

mod allocator;
mod process;
mod report;
mod settings;

use std::sync::OnceLock;

use lodestone::wsp::memory::{Full, Memory, MemoryOptions};

use settings::Settings;

/// What was opened, and what of it is told at the end.
struct Opened {
    memory: &'static Memory,
    settings: Settings,
}

static OPENED: OnceLock<Opened> = OnceLock::new();

/// Run by the dynamic linker before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = begin;

/// Run when the process exits, after its own.
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = end;

extern "C" fn begin() {
    let settings = match Settings::from_environment() {
        Ok(Some(settings)) => settings,
        Ok(None) => return,
        Err(message) => return report::refuse(&message),
    };
    if allocator::is_passed_over() {
        let whose = report::program();
        let message =
            format!("{whose} has an allocator of its own, which comes before the one that is preloaded");
        // Who asked for the media or nothing gets nothing.
        return match settings.full {
            Full::Fail => report::refuse(&message),
            Full::Dram => report::complain(&format!("{message}: its memory stays in DRAM")),
        };
    }
    let options = MemoryOptions { size: settings.size, full: settings.full, arenas: None };
    let opened = match settings.least_bytes {
        0 => Memory::replace_default(&settings.path, &options),
        _ => Memory::open(&settings.path, &options).map(|memory| &*Box::leak(Box::new(memory))),
    };
    match opened {
        Ok(memory) => {
            let least_bytes = settings.least_bytes;
            let opened = OPENED.get_or_init(|| Opened { memory, settings });
            if least_bytes > 0 {
                allocator::divide(opened.memory, least_bytes);
            }
        }
        // Who asked for the media or nothing gets nothing.
        Err(e) if settings.full == Full::Fail => report::refuse(&e.to_string()),
        Err(e) => report::complain(&format!("{e}; the memory of this process stays in DRAM")),
    }
}

extern "C" fn end() {
    if let Some(Opened { memory, settings }) = OPENED.get()
        && let Some(to) = &settings.statistics
    {
        report::statistics(memory, to);
    }
}
