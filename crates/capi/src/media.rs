//! Copies without a pool: the mover on memory that a storage engine of another kind names.
//!
//! Tickets are numbers, looked up, so that one that is stale is an error instead of a crash.

use crate::call::{on, without_pool};
use crate::convert::{efault, input, output, store, string};
use crate::failure::remark;
use crate::handle::{Handles, Held};
use crate::pools::{bad_option, engine, options, pairs, remarks};
use crate::profile;
use libc::off_t;
use lodestone::error::{Error, Result};
use lodestone::limits::{COPY_PARTS_MAX, COPY_TICKETS_MAX};
use lodestone::media::{Addr, Domain, Media, Span, SpanOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::class::{Class, Owner};
use lodestone::mover::copies::{Copied, Copies, CopyOptions};
use lodestone::mover::engine_port::{Dram, RawTransfer, Route};
use lodestone::mover::ticket::RawTicket;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

/// Slow memory to copy to and from, without a pool: any number of threads may use it.
pub struct lode_media {
    _opaque: [u8; 0],
}

/// A copy, a read or a write under way: see lode_copy_to_media_async, lode_pread_async. Never negative.
pub type lode_ticket = i64;

/// One part of a vectored copy: bytes at offset at of the media, and their buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct lode_copy {
    pub at: u64,
    pub buffer: *mut c_void,
    pub bytes: usize,
}

/// What is copied is durable when the call (or lode_media_wait) returns.
pub const LODE_COPY_DURABLE: c_int = 1;
/// Of which class the copy is, where its engine has channels (see class of lode_open_pool); neither: of none, and what
/// lode_pread2 and its like copy of the file's.
pub const LODE_COPY_LATENCY: c_int = 2;
pub const LODE_COPY_BANDWIDTH: c_int = 4;

/// Directions of lode_copy_vectored.
pub const LODE_TO_MEDIA: c_int = 1;
pub const LODE_FROM_MEDIA: c_int = 2;

/// What a handle stands for.
struct OpenMedia {
    copies: Copies,
    name: String,
    /// Of [`EngineKind::NAMED`].
    engine: AtomicUsize,
    tickets: Mutex<HashMap<lode_ticket, RawTicket>>,
}

static MEDIA: Handles<OpenMedia> = Handles::new();

impl Held for OpenMedia {
    const NOT_ONE: &str = "not media that lode_media_open or lode_media_map returned";
    const CLOSED: &str = "the media are closed";
    const INHERITED: &str =
        "the media were opened before fork(): the child cannot use them; use threads, or let the child exec";
    const DISTRUSTED: &str = "the media met an internal error: close them and open them again";
    const TOO_MANY: &str = "media are open in this process: close some";

    fn handles() -> &'static Handles<OpenMedia> {
        &MEDIA
    }

    fn end_copies(&self) {
        self.copies.wait_for_all();
    }
}

/// Opens slow memory as it is, for lode_copy_to_media and its kin: a regular file, a file on a DAX mount, a block
/// device, a device-dax node; path NULL: anonymous memory of size= bytes. Returns NULL on failure.
///
/// Nothing but copies changes it: there is no header and no label. The file is locked (flock) until it is closed;
/// copies of other processes need a lock of their own.
///
/// opts: NULL, or a comma-separated list of
///   ro                      copies to it fail with EROFS
///   size=BYTES              make the file where there is none, so long at least, its blocks reserved
///   force                   also where there is a pool
///   prefault                take every page now
///   assume=DOMAIN           cpu-cache, memory or page-cache, as lode_open_pool explains it
///   engine=ENGINE           who copies, as lode_open_pool explains it
///   concurrency=N           copies at a time of semaphore, and threads of delegate
///   threshold=BYTES         engines get copies from this size on, at least 4096; smaller ones the caller copies
///   profile=FILE            what engines are worth, as `lode tune` wrote it, but for what the two above say; else the
///                           file that LODE_PROFILE names. One that is damaged or was made on another machine is not
///                           used: defaults are, and lode_last_error() says why.
///
/// Errors: EACCES, EBUSY (in use), EEXIST (a pool is there: force), EINVAL (an option; an empty file), EIO, EMFILE
/// (256 are open, or 1024 regions mapped), ENOENT, ENOMEM, ENOSPC. Durable: the file, where it was made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_open(path: *const c_char, opts: *const c_char) -> *mut lode_media {
    without_pool("lode_media_open", || {
        // SAFETY: the contract at the head of the header.
        let settings = Settings::parse(&unsafe { options(opts) }?)?;
        let span = match path.is_null() {
            false => {
                // SAFETY: as above.
                let path = Path::new(OsStr::from_bytes(unsafe { string(path) }?));
                Span::open(path, &settings.span)?
            }
            true => {
                let bytes =
                    settings.span.size.ok_or_else(|| invalid("anonymous memory needs size=".into()))?;
                Span::memfd(bytes, &settings.span)?
            }
        };
        open("lode_media_open", span, settings)
    })
}

/// As lode_media_open for bytes bytes at start that the caller has mapped, and keeps mapped until lode_media_close
/// has returned. domain says what makes stores to them durable, and is believed: "cpu-cache" (a fence), "memory" (a
/// write-back and a fence), "page-cache" (msync), "volatile" (nothing). opts: ro, engine=, concurrency=, threshold=,
/// profile=.
/// Errors: EFAULT, EINVAL, EMFILE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_map(
    start: *mut c_void,
    bytes: usize,
    domain: *const c_char,
    opts: *const c_char,
) -> *mut lode_media {
    without_pool("lode_media_map", || {
        if start.is_null() {
            return Err(efault());
        }
        // SAFETY: the contract at the head of the header.
        let (domain, settings) = unsafe { (string(domain)?, Settings::parse(&options(opts)?)?) };
        let domain = parse_domain(&String::from_utf8_lossy(domain))?;
        let SpanOptions { read_only, prefault, size, force, assume } = settings.span;
        if prefault || force || size.is_some() || assume.is_some() {
            return Err(invalid("size=, force, prefault and assume= are for lode_media_open".into()));
        }
        // SAFETY: the contract above, and at the head of the header.
        let span = unsafe { Span::mapped(start.cast(), bytes, domain, read_only) }?;
        open("lode_media_map", span, settings)
    })
}

fn open(call: &'static str, span: Span, settings: Settings) -> Result<*mut lode_media> {
    let handle = MEDIA.take()?;
    let (name, region) = (span.name(), span.describe());
    let (mut profile, about_profile) =
        profile::of_regions(settings.profile.as_deref(), region.as_ref().map(std::slice::from_ref));
    if let Some(concurrency) = settings.concurrency {
        profile.concurrency = concurrency;
    }
    if let Some(bytes) = settings.threshold {
        profile = profile.handing_over_from(bytes);
    }
    let copies = Copies::new(span, settings.engine, profile);
    if let Some(remarks) = remarks(about_profile, settings.engine, copies.mover().missing()) {
        remark(call, remarks);
    }
    let (engine, tickets) = (AtomicUsize::new(place_of(settings.engine)), Mutex::default());
    Ok(handle.fill(OpenMedia { copies, name, engine, tickets }).cast())
}

/// Waits for the calls in flight and for all copies under way, and gives the memory free. Their tickets end with it; who
/// is answered EBADF knows that no copy goes on. The handle is invalid afterwards. Errors: EBADF (closed already), EINVAL (not media). Makes nothing durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_close(media: *mut lode_media) -> c_int {
    without_pool("lode_media_close", || {
        let handle = MEDIA.of(media.addr())?;
        handle.empty(drop)?;
        handle.give_back();
        Ok(0)
    })
}

/// Bytes of the media.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_size(media: *mut lode_media) -> off_t {
    on_media("lode_media_size", media, |media| Ok(media.copies.media().len() as off_t))
}

/// The persistence domain by which copies are made durable: "cpu-cache", "memory", "page-cache" or "volatile" (nothing
/// survives loss of power). Valid for ever; NULL on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_domain(media: *mut lode_media) -> *const c_char {
    on_media("lode_media_domain", media, |media| {
        Ok(match media.copies.media().domain() {
            Domain::CpuCache => c"cpu-cache",
            Domain::Memory => c"memory",
            Domain::PageCache => c"page-cache",
            Domain::Volatile => c"volatile",
        }
        .as_ptr())
    })
}

/// From now on this engine copies, whatever lode_media_open was told. Copies under way stay with theirs. Errors:
/// EFAULT, EINVAL (no such engine).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_set_engine(media: *mut lode_media, name: *const c_char) -> c_int {
    on_media("lode_media_set_engine", media, |media| {
        // SAFETY: the contract at the head of the header.
        let kind = engine(&String::from_utf8_lossy(unsafe { string(name) }?))?;
        media.engine.store(place_of(kind), Ordering::Relaxed);
        Ok(0)
    })
}

/// Copies bytes bytes from a buffer to offset at of the media, and waits. Any alignment; 0 bytes are no error.
///
/// flags: 0, or LODE_COPY_DURABLE: durable on return, which in the domain page-cache takes a sync of the file. Without
/// it what is copied is durable after the next lode_media_fence of the same thread. A crash before that leaves any
/// part of the copy. LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH: what is wanted of it beside other copies.
///
/// crc: NULL, or a CRC-32C (Castagnoli) to be continued by the bytes copied, 0 to begin.
///
/// Errors: EFAULT, EINVAL (outside of the media; the buffer overlaps its target; a flag), EIO (bad media, a file that
/// was cut, a sync that failed: any part of the target may have changed), EROFS.
///
/// (With lode_copy_from_media and lode_copy_vectored the calls of Fastmove, Table 3, in user space.)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_copy_to_media(
    media: *mut lode_media,
    at: u64,
    buffer: *const c_void,
    bytes: usize,
    flags: c_int,
    crc: *mut u32,
) -> c_int {
    on_media("lode_copy_to_media", media, |media| {
        // SAFETY: the contract at the head of the header.
        let (from, options) = unsafe { (input(buffer, bytes)?, media.options(flags, crc)?) };
        // SAFETY: as above.
        unsafe { media.copied(media.copies.to_media(Addr(at), from, &options), crc) }
    })
}

/// Copies bytes bytes from offset at of the media to a buffer, and waits. flags: 0; LODE_COPY_DURABLE changes nothing.
/// crc and errors as lode_copy_to_media; after EIO any part of the buffer may have changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_copy_from_media(
    media: *mut lode_media,
    at: u64,
    buffer: *mut c_void,
    bytes: usize,
    flags: c_int,
    crc: *mut u32,
) -> c_int {
    on_media("lode_copy_from_media", media, |media| {
        // SAFETY: the contract at the head of the header.
        let (to, options) = unsafe { (output(buffer, bytes)?, media.options(flags, crc)?) };
        // SAFETY: as above.
        unsafe { media.copied(media.copies.from_media(Addr(at), to, &options), crc) }
    })
}

/// Copies count parts, at most 1024, all in one direction (LODE_TO_MEDIA or LODE_FROM_MEDIA), and waits: an engine gets
/// them in as few submissions as it takes. flags and crc as lode_copy_to_media; the checksum goes through the parts in
/// their order. Errors: those of lode_copy_to_media; EINVAL also where targets of two parts overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_copy_vectored(
    media: *mut lode_media,
    direction: c_int,
    parts: *const lode_copy,
    count: c_int,
    flags: c_int,
    crc: *mut u32,
) -> c_int {
    on_media("lode_copy_vectored", media, |media| {
        // SAFETY: the contract at the head of the header; it is waited for here.
        unsafe {
            let (parts, options) = (transfers(direction, parts, count)?, media.options(flags, crc)?);
            let ticket = media.copies.submit_raw(&parts, &options);
            media.copied(ticket.and_then(|ticket| ticket.wait()), crc)
        }
    })
}

/// Begins what lode_copy_to_media does, and returns a ticket for lode_media_poll and lode_media_wait. Until the ticket
/// has ended the buffer is the copy's: it stays where it is, and nobody changes it. With the engines cpu and
/// semaphore, and below an engine's threshold, the copy is made before this returns.
///
/// crc: NULL, or where the CRC-32C to be continued is, which is read now; lode_media_wait gives the new one.
///
/// Errors: those of lode_copy_to_media but EIO, which lode_media_wait tells; EAGAIN (nobody waited for 65536 others).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_copy_to_media_async(
    media: *mut lode_media,
    at: u64,
    buffer: *const c_void,
    bytes: usize,
    flags: c_int,
    crc: *const u32,
) -> lode_ticket {
    let part = lode_copy { at, buffer: buffer.cast_mut(), bytes };
    // SAFETY: the contract above, and at the head of the header.
    unsafe { submit("lode_copy_to_media_async", media, LODE_TO_MEDIA, &raw const part, 1, flags, crc) }
}

/// Begins what lode_copy_from_media does. Until the ticket has ended nobody uses the buffer. Otherwise as
/// lode_copy_to_media_async.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_copy_from_media_async(
    media: *mut lode_media,
    at: u64,
    buffer: *mut c_void,
    bytes: usize,
    flags: c_int,
    crc: *const u32,
) -> lode_ticket {
    let part = lode_copy { at, buffer, bytes };
    // SAFETY: the contract above, and at the head of the header.
    unsafe { submit("lode_copy_from_media_async", media, LODE_FROM_MEDIA, &raw const part, 1, flags, crc) }
}

/// Begins what lode_copy_vectored does; the array of parts is read now, the buffers are the copy's. Otherwise as
/// lode_copy_to_media_async.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_copy_vectored_async(
    media: *mut lode_media,
    direction: c_int,
    parts: *const lode_copy,
    count: c_int,
    flags: c_int,
    crc: *const u32,
) -> lode_ticket {
    // SAFETY: the contract above, and at the head of the header.
    unsafe { submit("lode_copy_vectored_async", media, direction, parts, count, flags, crc) }
}

/// 1 where the copy of a ticket has ended, 0 where not, -1 on failure. Once it has, the buffers are the caller's; how it
/// ended, and the end of the ticket, is lode_media_wait's. May copy what an engine left undone. Errors: EINVAL (no
/// such ticket, or it was waited for).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_poll(media: *mut lode_media, ticket: lode_ticket) -> c_int {
    on_media("lode_media_poll", media, |media| Ok(media.ticket(ticket)?.poll().into()))
}

/// Waits until the copy of a ticket has ended, and is durable where that was asked for. Any thread may, and several at
/// once; the first that returns ends the ticket. crc: NULL, or where the checksum goes, if one was asked for. Errors:
/// EINVAL (no such ticket, or it was waited for), EIO (bad media, or a sync that failed): the ticket has ended then,
/// too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_wait(
    media: *mut lode_media,
    ticket: lode_ticket,
    crc: *mut u32,
) -> c_int {
    on_media("lode_media_wait", media, |media| {
        let ended = media.ticket(ticket)?.wait();
        media.tickets.lock().remove(&ticket);
        // SAFETY: the contract at the head of the header.
        unsafe { media.copied(ended, crc) }
    })
}

/// Makes durable what this thread copied to the media without LODE_COPY_DURABLE, and the copies by ticket that have
/// ended. Errors: EIO: what of it is kept nobody knows. Durable: those.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_fence(media: *mut lode_media) -> c_int {
    on_media("lode_media_fence", media, |media| media.named(media.copies.fence()).map(|()| 0))
}

/// Waits for all copies under way, those of other threads too, then does what lode_media_fence does. Tickets stay, for
/// lode_media_wait to tell how each ended. Errors: EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_media_drain(media: *mut lode_media) -> c_int {
    on_media("lode_media_drain", media, |media| media.named(media.copies.drain()).map(|()| 0))
}

#[inline]
fn on_media<R: crate::call::Failed>(
    call: &'static str,
    media: *mut lode_media,
    run: impl FnOnce(&OpenMedia) -> Result<R>,
) -> R {
    on(call, media.addr(), run)
}

/// # Safety
/// That of the functions that call it.
unsafe fn submit(
    call: &'static str,
    media: *mut lode_media,
    direction: c_int,
    parts: *const lode_copy,
    count: c_int,
    flags: c_int,
    crc: *const u32,
) -> lode_ticket {
    static NEXT: AtomicI64 = AtomicI64::new(1);
    on_media(call, media, |media| {
        // SAFETY: the caller's.
        let (parts, options) = unsafe { (transfers(direction, parts, count)?, media.options(flags, crc)?) };
        if media.tickets.lock().len() >= COPY_TICKETS_MAX {
            let message = format!("nobody waited for {COPY_TICKETS_MAX} copies: wait for some");
            return media.named(Err(Error::message(libc::EAGAIN, "capi::media", message)));
        }
        // SAFETY: the caller's, until the ticket has ended.
        let ticket = media.named(unsafe { media.copies.submit_raw(&parts, &options) })?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        media.tickets.lock().insert(number, ticket);
        Ok(number)
    })
}

/// # Safety
/// `parts` is NULL or points to so many, whose buffers are NULL or as long as they say.
unsafe fn transfers(direction: c_int, parts: *const lode_copy, count: c_int) -> Result<Vec<RawTransfer>> {
    if direction != LODE_TO_MEDIA && direction != LODE_FROM_MEDIA {
        return Err(invalid(format!("{direction} is no direction: LODE_TO_MEDIA or LODE_FROM_MEDIA")));
    }
    let count = usize::try_from(count).ok().filter(|count| *count <= COPY_PARTS_MAX);
    let count = count.ok_or_else(|| invalid(format!("a copy has 0 to {COPY_PARTS_MAX} parts")))?;
    if parts.is_null() && count > 0 {
        return Err(Error::new(libc::EFAULT, "capi::media"));
    }
    let mut all = Vec::with_capacity(count);
    for n in 0..count {
        // SAFETY: the caller's.
        let lode_copy { at, buffer, bytes } = unsafe { parts.add(n).read() };
        if buffer.is_null() && bytes > 0 {
            return Err(Error::new(libc::EFAULT, "capi::media"));
        }
        let dram = match direction {
            // The scheduler chooses the route.
            LODE_TO_MEDIA => Dram::From(buffer.cast_const().cast(), Route::PastCaches),
            _ => Dram::To(buffer.cast()),
        };
        all.push(RawTransfer { at: Addr(at), dram, len: bytes });
    }
    Ok(all)
}

const CLASSES: c_int = LODE_COPY_LATENCY | LODE_COPY_BANDWIDTH;

/// The class that flags name. EINVAL for both, and for others.
pub fn class_of_flags(flags: c_int) -> Result<Option<Class>> {
    let wrong = match flags {
        0 => return Ok(None),
        LODE_COPY_LATENCY => return Ok(Some(Class::Latency)),
        LODE_COPY_BANDWIDTH => return Ok(Some(Class::Bandwidth(Owner::process()))),
        CLASSES => "a copy is of one class, LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH",
        _ => "only LODE_COPY_LATENCY and LODE_COPY_BANDWIDTH are known",
    };
    Err(invalid(format!("flags {flags:#x}: {wrong}")))
}

impl OpenMedia {
    /// # Safety
    /// `crc` is NULL or points to one.
    unsafe fn options(&self, flags: c_int, crc: *const u32) -> Result<CopyOptions> {
        if flags & !(LODE_COPY_DURABLE | CLASSES) != 0 {
            let known = "LODE_COPY_DURABLE, LODE_COPY_LATENCY and LODE_COPY_BANDWIDTH are known";
            return Err(invalid(format!("flags {flags:#x}: only {known}")));
        }
        let class = class_of_flags(flags & CLASSES)?;
        // SAFETY: the caller's.
        let crc = (!crc.is_null()).then(|| unsafe { crc.read() });
        let engine = Some(EngineKind::NAMED[self.engine.load(Ordering::Relaxed)]);
        Ok(CopyOptions { durable: flags & LODE_COPY_DURABLE != 0, crc, engine, class })
    }

    fn ticket(&self, number: lode_ticket) -> Result<RawTicket> {
        let known = self.tickets.lock().get(&number).cloned();
        let unknown = || invalid(format!("{number} is no ticket of these media, or it was waited for"));
        self.named(known.ok_or_else(unknown))
    }

    /// The answer of a copy.
    ///
    /// # Safety
    /// `crc` is NULL or points to room for one.
    unsafe fn copied(&self, copied: Result<Copied>, crc: *mut u32) -> Result<c_int> {
        let copied = self.named(copied)?;
        if let Some(value) = copied.crc.filter(|_| !crc.is_null()) {
            // SAFETY: the caller's.
            unsafe { store(crc, value) }?;
        }
        Ok(0)
    }

    /// Says in an error which media it is about.
    fn named<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|e| e.context(&self.name))
    }
}

fn place_of(kind: EngineKind) -> usize {
    EngineKind::NAMED.iter().position(|named| *named == kind).expect("it was named")
}

fn invalid(message: String) -> Error {
    Error::message(libc::EINVAL, "capi::media", message)
}

fn parse_domain(name: &str) -> Result<Domain> {
    name.parse().map_err(invalid)
}

struct Settings {
    span: SpanOptions,
    engine: EngineKind,
    profile: Option<PathBuf>,
    concurrency: Option<usize>,
    threshold: Option<usize>,
}

impl Settings {
    fn parse(opts: &str) -> Result<Settings> {
        let (span, engine_kind) = (SpanOptions::default(), EngineKind::Cpu);
        let mut settings =
            Settings { span, engine: engine_kind, profile: None, concurrency: None, threshold: None };
        for (option, key, value) in pairs(opts) {
            let number = |value: &str| value.parse::<u64>().map_err(|_| bad_option(option));
            match (key, value) {
                ("ro", None) => settings.span.read_only = true,
                ("force", None) => settings.span.force = true,
                ("prefault", None) => settings.span.prefault = true,
                ("size", Some(bytes)) => settings.span.size = Some(number(bytes)?),
                ("assume", Some(domain)) => settings.span.assume = Some(parse_domain(domain)?),
                ("engine", Some(name)) => settings.engine = engine(name)?,
                ("concurrency", Some(copies)) => match number(copies)? {
                    copies @ 1..=CONCURRENCY_MAX => settings.concurrency = Some(copies as usize),
                    _ => return Err(invalid(format!("{option}: 1 to {CONCURRENCY_MAX}"))),
                },
                ("threshold", Some(bytes)) => {
                    settings.threshold =
                        Some(usize::try_from(number(bytes)?).map_err(|_| bad_option(option))?);
                }
                ("profile", Some(file)) if !file.is_empty() => settings.profile = Some(PathBuf::from(file)),
                _ => return Err(bad_option(option)),
            }
        }
        Ok(settings)
    }
}

/// Threads of one engine in front of one region.
const CONCURRENCY_MAX: u64 = 64;
