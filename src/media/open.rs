//! How a pool comes to be: created from files and devices, or found through the label of region 0.
//!
//! Whatever is wrong with what the user named is found here, before anything is mapped for use, and
//! each case gets its own sentence with the remedy. Creation undoes what it did to the host when a
//! later step fails.

use std::path::{Path, PathBuf};

use super::copy::{Isa, Routines};
use super::label::{Block0, LABEL_BYTES, Label, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN};
use super::pool::{Pool, PoolOptions};
use super::region::{OpenRegion, Region};
use super::{Domain, RegionKind};
use crate::error::{Error, Result};
use crate::limits::{POOL_BLOCKS_MAX, POOL_BYTES_MIN, REGIONS_MAX};
use crate::quote::Shown;

/// Stripe unit of a new pool: one huge page, in bytes.
const STRIPE_BYTES: u64 = 2 << 20;
const BLOCK: u64 = LABEL_BYTES as u64;
const CREATE: &str = "media::open::create";
const OPEN: &str = "media::open::open";

impl Pool {
    /// Makes a pool of files or devices. With a `size` (of the whole pool) files are created where they
    /// do not exist, and their blocks are taken from the host now; without, every path must exist and
    /// is used as it is, holes included. What holds anything already is taken only by
    /// [`PoolOptions::force`] (looked for as far as 256 MiB that are no holes). Nothing is left behind on failure.
    ///
    /// Of several devices the first leads to the others by the names that they have here: links in /dev/disk/by-id stay right
    /// where the kernel numbers them anew.
    pub fn create(paths: &[PathBuf], size: Option<u64>, options: &PoolOptions) -> Result<Pool> {
        let stripe_bytes = checked_stripe(options)?;
        let routines = Routines::choose(options.isa)?;
        if options.read_only {
            return Err(Error::message(libc::EINVAL, CREATE, "a pool cannot be created read-only"));
        }
        if paths.is_empty() || paths.len() > REGIONS_MAX {
            let message = format!("a pool has 1 to {REGIONS_MAX} regions, not {}", paths.len());
            return Err(Error::message(libc::EINVAL, CREATE, message));
        }
        let mut opened = Vec::with_capacity(paths.len());
        for path in paths {
            opened.push(add_region(path, size.is_some(), options.force, &opened)?);
        }
        let mut smallest = opened.iter().map(|r| r.bytes).min().unwrap_or(0);
        if let Some(size) = size {
            let each = region_bytes_for(size, paths.len(), stripe_bytes);
            opened.iter_mut().try_for_each(|r| r.reserve(each))?;
            // What is larger is used in part.
            smallest = each;
        }
        let label = Label {
            pool_uuid: new_uuid()?,
            region_index: 0,
            stripe_bytes,
            region_bytes: usable_bytes(smallest, opened.len(), stripe_bytes)?,
            paths: opened.iter().map(|r| r.path.clone()).collect(),
        };
        let mut pool = assemble(opened, label, routines, options)?;
        write_labels(&pool)?;
        pool.keep();
        Ok(pool)
    }

    /// Opens the pool whose region 0 is at `path`.
    pub fn open(path: &Path, options: &PoolOptions) -> Result<Pool> {
        let routines = Routines::choose(options.isa)?;
        let first = OpenRegion::open(path, options.read_only).map_err(|e| match e.errno() {
            libc::ENOENT => {
                let message = format!(
                    "cannot open {0}: No such file or directory; name a pool, or make one with `lode mkfs {0}`",
                    path.shown()
                );
                Error::message(libc::ENOENT, OPEN, message)
            }
            _ => with_remedy(e, options.read_only),
        })?;
        let label = read_label(&first)?;
        if label.region_index != 0 {
            return Err(Error::message(
                libc::EINVAL,
                OPEN,
                format!(
                    "{} is region {} of the {} regions of its pool: open region 0, {}",
                    first.path.shown(),
                    label.region_index,
                    label.paths.len(),
                    label.paths[0].shown()
                ),
            ));
        }
        check_length(&first, &label)?;
        let home = Home::of(&first, &label);
        let mut opened = vec![first];
        for index in 1..label.paths.len() {
            let region = open_other(&opened, home, &label, index, options.read_only)?;
            opened.push(region);
        }
        assemble(opened, label, routines, options)
    }

    /// Opens the file or device at `path`, whose block 0 is damaged or holds something else, as the only region of a pool
    /// of `bytes`, or of as many as there are. Whether it is one nobody has looked yet. None where its label says
    /// something, or it is too short.
    pub fn open_unlabelled(path: &Path, bytes: Option<u64>, options: &PoolOptions) -> Result<Option<Pool>> {
        let routines = Routines::choose(options.isa)?;
        let region = OpenRegion::open(path, options.read_only)?;
        let has_none = |block0| matches!(block0, Block0::Damaged(_) | Block0::Blank | Block0::Foreign);
        let bytes = bytes.unwrap_or(region.bytes & !(BLOCK - 1));
        if bytes < POOL_BYTES_MIN || bytes > region.bytes || !has_none(Label::decode(&read_block0(&region)?))
        {
            return Ok(None);
        }
        let region_bytes = usable_bytes(bytes, 1, STRIPE_BYTES)?;
        let paths = vec![region.path.clone()];
        let label = Label {
            pool_uuid: new_uuid()?,
            region_index: 0,
            stripe_bytes: STRIPE_BYTES,
            region_bytes,
            paths,
        };
        assemble(vec![region], label, routines, options).map(Some)
    }

    /// Writes the label of a pool that [`Pool::open_unlabelled`] opened. Durable.
    pub fn write_label(&self) -> Result<()> {
        write_labels(self)
    }

    /// A pool in anonymous memory of `bytes`; pages are taken at first use.
    pub fn memfd(bytes: u64, options: &PoolOptions) -> Result<Pool> {
        let stripe_bytes = checked_stripe(options)?;
        let routines = Routines::choose(options.isa)?;
        let region_bytes = usable_bytes(bytes, 1, stripe_bytes)?;
        let region = OpenRegion::memfd(region_bytes)?;
        let paths = vec![region.path.clone()];
        let label = Label { pool_uuid: new_uuid()?, region_index: 0, stripe_bytes, region_bytes, paths };
        let pool = assemble(vec![region], label, routines, options)?;
        write_labels(&pool)?;
        Ok(pool)
    }
}

/// Maps the regions and puts them together.
fn assemble(
    opened: Vec<OpenRegion>,
    label: Label,
    routines: (Isa, Routines),
    options: &PoolOptions,
) -> Result<Pool> {
    let mut regions = Vec::with_capacity(opened.len());
    for region in opened {
        regions.push(region.map(label.region_bytes, options.prefault)?);
    }
    let domain = choose_domain(&regions, options.assume, routines.0)?;
    Ok(Pool::of_regions(regions, label, domain, routines, options))
}

/// Writes all labels; region 0's last, because it makes the pool.
fn write_labels(pool: &Pool) -> Result<()> {
    for (index, region) in pool.regions().iter().enumerate().rev() {
        let block = Label { region_index: index, ..pool.label().clone() }.encode()?;
        // SAFETY: block 0 is inside the region's mapping, and `block` is our own.
        let stored = unsafe { pool.copier().copy_nt(region.map.base(), &block) };
        stored.map_err(|address| Error::from(pool.fault(address)))?;
        pool.copier().fence();
        region.settle()?;
    }
    Ok(())
}

/// The persistence domain to work by.
pub(super) fn choose_domain(regions: &[Region], assume: Option<Domain>, isa: Isa) -> Result<Domain> {
    if let Some(wanted) = assume {
        for region in regions {
            if !region.detected.may_assume(wanted) {
                return Err(Error::message(
                    libc::EINVAL,
                    OPEN,
                    format!(
                        "{} is in the persistence domain {}, which {wanted} would weaken: leave the \
                         assumption out, or assume memory",
                        region.path.shown(),
                        region.detected
                    ),
                ));
            }
        }
    }
    let domain = match (assume, join_domains(regions)) {
        (Some(wanted), _) => wanted,
        (None, Some(domain)) => domain,
        (None, None) => {
            let kinds: Vec<String> =
                regions.iter().map(|r| format!("{} is {}", r.path.shown(), r.detected)).collect();
            let message =
                format!("one pool cannot mix persistent memory with other files ({})", kinds.join(", "));
            return Err(Error::message(libc::EINVAL, OPEN, message));
        }
    };
    if domain.is_persistent_memory() && isa == Isa::Portable {
        let message = format!(
            "{} is in the persistence domain {domain}, and there are no instructions known here that write \
             caches back on this processor: use an ordinary file",
            regions[0].path.shown()
        );
        return Err(Error::message(libc::EOPNOTSUPP, OPEN, message));
    }
    Ok(domain)
}

/// What the regions' domains come to together.
pub(super) fn join_domains(regions: &[Region]) -> Option<Domain> {
    regions.iter().map(|r| Some(r.detected)).reduce(|a, b| a?.join(b?)).flatten()
}

fn checked_stripe(options: &PoolOptions) -> Result<u64> {
    let bytes = options.stripe_bytes.unwrap_or(STRIPE_BYTES);
    if bytes.is_power_of_two() && (STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    Err(Error::message(
        libc::EINVAL,
        CREATE,
        format!(
            "a stripe unit of {bytes} bytes is not possible: use a power of two from {STRIPE_BYTES_MIN} \
             to {STRIPE_BYTES_MAX}"
        ),
    ))
}

/// Bytes of each of `count` regions for a pool of `size` bytes, whole stripes.
fn region_bytes_for(size: u64, count: usize, stripe_bytes: u64) -> u64 {
    let unit = if count == 1 { BLOCK } else { stripe_bytes };
    let each = size.div_ceil(count as u64);
    each.checked_next_multiple_of(unit).unwrap_or(each)
}

/// Bytes that a pool uses of each of its `count` regions, the smallest of which has `smallest`.
fn usable_bytes(smallest: u64, count: usize, stripe_bytes: u64) -> Result<u64> {
    let unit = if count == 1 { BLOCK } else { stripe_bytes };
    let min = (POOL_BYTES_MIN / count as u64).next_multiple_of(unit).max(2 * unit);
    let max = POOL_BLOCKS_MAX * BLOCK / count as u64;
    let bytes = smallest & !(unit - 1);
    if (min..=max).contains(&bytes) {
        return Ok(bytes);
    }
    let message = format!(
        "a pool of {count} region(s) needs {min} to {max} bytes in each, and the smallest has {smallest}: \
         give another size"
    );
    Err(Error::message(libc::EINVAL, CREATE, message))
}

/// Opens (or creates, with `may_create`) what is to be a region, and checks that it may be.
fn add_region(path: &Path, may_create: bool, force: bool, others: &[OpenRegion]) -> Result<OpenRegion> {
    if may_create {
        match OpenRegion::create(path) {
            Err(e) if e.errno() == libc::EEXIST => {}
            made => return made,
        }
    }
    // Compared before it is opened: our own lock on it would look like another process's.
    if let Some(id) = OpenRegion::identity_of(path)
        && others.iter().any(|r| r.identity() == id)
    {
        let message = format!("{} is named twice: regions must be different files", path.shown());
        return Err(Error::message(libc::EINVAL, CREATE, message));
    }
    let region = OpenRegion::open(path, false).map_err(|e| match e.errno() {
        libc::ENOENT if may_create => {
            let message = format!(
                "{} is a symbolic link that leads nowhere: remove it, or name another file",
                path.shown()
            );
            Error::message(libc::ENOENT, CREATE, message)
        }
        libc::ENOENT => e.context("give a size to create the pool's file"),
        _ => e,
    })?;
    if !may_create && region.bytes < BLOCK {
        return Err(too_short(&region));
    }
    if region.is_used() {
        let message = format!("a guest runs whose memory is in {}: stop it first", region.path.shown());
        return Err(Error::message(libc::EBUSY, CREATE, message));
    }
    if !force {
        check_free(&region)?;
    }
    Ok(region)
}

/// Whether a file or device that begins so holds a pool, whole or damaged.
pub(super) fn begins_pool(beginning: &[u8]) -> bool {
    let block0 = Label::decode(beginning[..LABEL_BYTES].try_into().expect("as long as a label"));
    matches!(block0, Block0::Label(_) | Block0::Newer(_) | Block0::Damaged(_))
}

/// Whether the file or device at `path` holds a pool, or what is left of one, whoever uses it.
pub fn holds_pool(path: &Path) -> Result<bool> {
    Ok(label_beside(path)?.is_some_and(|block| begins_pool(&block)))
}

/// Block 0, beside whoever has the file; none where it is shorter.
fn label_beside(path: &Path) -> Result<Option<[u8; LABEL_BYTES]>> {
    let read_only = OpenRegion::kind_of(path)? != RegionKind::DeviceDax;
    match OpenRegion::open_part(path, 0..LABEL_BYTES as u64, read_only) {
        Ok(region) => read_block0(&region).map(Some),
        Err(e) if e.errno() == libc::EINVAL => Ok(None),
        Err(e) => Err(e),
    }
}

/// Refuses to make a pool of what holds something.
fn check_free(region: &OpenRegion) -> Result<()> {
    let what = match Label::decode(&read_block0(region)?) {
        Block0::Blank => match region.first_data()? {
            None => return Ok(()),
            Some(at) => format!("is not empty (there is data at byte {at})"),
        },
        Block0::Label(_) | Block0::Newer(_) => "holds a pool already".into(),
        Block0::Damaged(_) => "holds a pool already, whose label is damaged".into(),
        Block0::Foreign => "holds other data already".into(),
    };
    Err(Error::message(
        libc::EEXIST,
        CREATE,
        format!(
            "{} {what}: use another file, or force (lode mkfs --force) to destroy what it holds",
            region.path.shown()
        ),
    ))
}

fn too_short(region: &OpenRegion) -> Error {
    let path = region.path.shown();
    let what = if region.bytes == 0 { "is empty" } else { "is too short to hold a pool" };
    Error::message(
        libc::EINVAL,
        OPEN,
        format!("{path} {what}: name a pool, or make one with `lode mkfs FILE --size SIZE`"),
    )
}

/// Block 0 of a region, before the region is mapped for use; zeros where the file is shorter.
pub(super) fn read_block0(region: &OpenRegion) -> Result<[u8; LABEL_BYTES]> {
    let mut block = [0; LABEL_BYTES];
    region.read_head(&mut block)?;
    Ok(block)
}

/// What says what a file or device holds: so many bytes that file systems and volume managers
/// which leave the first blocks alone have begun; zeros where there is less.
pub(super) fn read_beginning(region: &OpenRegion) -> Result<Vec<u8>> {
    const BEGINNING_BYTES: usize = 128 << 10;
    let mut beginning = vec![0; BEGINNING_BYTES];
    region.read_head(&mut beginning)?;
    Ok(beginning)
}

/// The label of a region that must have one.
fn read_label(region: &OpenRegion) -> Result<Label> {
    let path = region.path.shown();
    if region.bytes < BLOCK {
        return Err(too_short(region));
    }
    match Label::decode(&read_block0(region)?) {
        Block0::Label(label) => Ok(label),
        Block0::Blank | Block0::Foreign => Err(Error::message(
            libc::EINVAL,
            OPEN,
            format!("{path} holds no Lodestone pool: name a pool, or make one with `lode mkfs FILE`"),
        )),
        Block0::Newer(version) => Err(Error::message(
            libc::EOPNOTSUPP,
            OPEN,
            format!(
                "{path} has a label of format version {version}, later than this program knows: use a newer Lodestone"
            ),
        )),
        Block0::Damaged(why) => Err(Error::message(
            libc::EUCLEAN,
            OPEN,
            format!(
                "the label of {path} is damaged ({why}): lode fsck says whether it can be written again, else restore its \
                 first {BLOCK} bytes from a copy"
            ),
        )),
    }
}

fn check_length(region: &OpenRegion, label: &Label) -> Result<()> {
    if region.bytes >= label.region_bytes {
        return Ok(());
    }
    Err(Error::message(
        libc::EINVAL,
        OPEN,
        format!(
            "{} has {} bytes, and its label says {}: the file was cut; restore it from a copy",
            region.path.shown(),
            region.bytes,
            label.region_bytes
        ),
    ))
}

/// Whether region 0 is where its label says, which decides where the other regions are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Home {
    Here,
    Moved,
    /// Region 0 of the same pool is there still. The regions that the label names are that one's: with this one they
    /// would make a pool of two ages, and a change to it would damage both.
    Copied,
}

impl Home {
    fn of(first: &OpenRegion, label: &Label) -> Home {
        let home = &label.paths[0];
        if OpenRegion::identity_of(home) == Some(first.identity()) {
            return Home::Here;
        }
        let original = label_beside(home).ok().flatten().is_some_and(|block| {
            let found = Label::decode(&block);
            matches!(found, Block0::Label(l) if (l.pool_uuid, l.region_index) == (label.pool_uuid, 0))
        });
        if original { Home::Copied } else { Home::Moved }
    }
}

/// Opens region `index` of the pool whose region 0 is the first of `opened`: where the label says, or beside region 0. Of
/// a pool that was moved, or copied, the latter comes first: another copy may have stayed where it was.
fn open_other(
    opened: &[OpenRegion],
    home: Home,
    label: &Label,
    index: usize,
    read_only: bool,
) -> Result<OpenRegion> {
    let first = &opened[0].path;
    let labelled = &label.paths[index];
    let beside = labelled.file_name().map(|name| first.with_file_name(name));
    let identity = OpenRegion::identity_of(labelled);
    let beside = beside.filter(|b| b.exists() && OpenRegion::identity_of(b) != identity);
    let places = match home {
        Home::Here => [Some(labelled), beside.as_ref()],
        Home::Moved => [beside.as_ref(), Some(labelled)],
        Home::Copied => [beside.as_ref(), None],
    };
    let mut result = None;
    for place in places.into_iter().flatten() {
        let found = open_matching(place, opened, label, index, read_only);
        let is_final = found.as_ref().map_or_else(|e| e.errno() == libc::EBUSY, |_| true);
        // What is wrong in the first place is said: there it should be.
        if is_final || result.is_none() {
            result = Some(found);
        }
        if is_final {
            break;
        }
    }
    let nowhere = || {
        let message = format!(
            "{} is a copy of {}, whose other regions are not its own: bring a copy of {} beside it, in a directory \
             without the original",
            first.shown(),
            label.paths[0].shown(),
            labelled.shown()
        );
        Err(Error::message(libc::EINVAL, OPEN, message))
    };
    result.unwrap_or_else(nowhere).map_err(|e| {
        let count = label.paths.len();
        e.context(format!("region {index} of the {count} regions of {}", first.shown()))
    })
}

/// Says what to do where the host refuses a file or device of a pool, or does not have it.
fn with_remedy(e: Error, read_only: bool) -> Error {
    let remedy = match e.errno() {
        libc::EACCES | libc::EPERM if read_only => "run as its owner or root",
        libc::EACCES | libc::EPERM => "run as its owner or root, or open it read-only (mount -o ro, ls, cat)",
        libc::EROFS => "open it read-only (mount -o ro, ls, cat)",
        libc::ENOENT => "bring it back",
        _ => return e,
    };
    let (errno, text) = (e.errno(), e.to_string());
    let text = text.trim_end_matches(&format!(" (os error {errno})"));
    Error::message(errno, OPEN, format!("{text}; {remedy}"))
}

fn open_matching(
    path: &Path,
    others: &[OpenRegion],
    pool: &Label,
    index: usize,
    read_only: bool,
) -> Result<OpenRegion> {
    // Compared before it is opened: our own lock on it would look like another process's.
    let identity = OpenRegion::identity_of(path);
    if let Some(at) = others.iter().position(|r| Some(r.identity()) == identity) {
        let message =
            format!("{} is the same file or device as region {at}: bring the right file back", path.shown());
        return Err(Error::message(libc::EINVAL, OPEN, message));
    }
    let region = OpenRegion::open(path, read_only).map_err(|e| with_remedy(e, read_only))?;
    let wrong = |path: &Path| {
        let message = format!(
            "{} belongs to another pool, or to another place in this one: bring the right file back",
            path.shown()
        );
        Error::message(libc::EINVAL, OPEN, message)
    };
    if region.bytes < BLOCK {
        check_length(&region, pool)?;
    }
    let label = match Label::decode(&read_block0(&region)?) {
        Block0::Blank | Block0::Foreign => return Err(wrong(path)),
        // It is written again by nobody: what stood there is known of region 0 alone.
        Block0::Damaged(why) => {
            let path = path.shown();
            let message = format!(
                "the label of {path} is damaged ({why}): bring the right file back, or its first {BLOCK} bytes"
            );
            return Err(Error::message(libc::EUCLEAN, OPEN, message));
        }
        _ => read_label(&region)?,
    };
    let same = (label.pool_uuid, label.region_index, label.stripe_bytes, label.region_bytes)
        == (pool.pool_uuid, index, pool.stripe_bytes, pool.region_bytes);
    if !same || label.paths.len() != pool.paths.len() {
        return Err(wrong(path));
    }
    check_length(&region, pool)?;
    Ok(region)
}

fn new_uuid() -> Result<[u8; 16]> {
    let mut uuid = [0; 16];
    // SAFETY: the buffer is ours and as long as said.
    let got = unsafe { libc::getrandom(uuid.as_mut_ptr().cast(), uuid.len(), 0) };
    if got != uuid.len() as isize {
        return Err(Error::message(
            libc::EIO,
            CREATE,
            "the kernel gave no random numbers for the pool's identity",
        ));
    }
    // Version 4, variant 1 (RFC 9562).
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}
