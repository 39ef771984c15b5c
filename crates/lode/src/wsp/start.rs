//! `lode wsp start`: memory is made, the record says that a guest was booted on it, the guest boots.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lodestone::error::Error;
use lodestone::media::{Addr, Media, device_align};
use lodestone::wsp::image::TRAILER_BYTES;
use lodestone::wsp::{Machine, Ram, State, record};
use serde_json::json;

use super::emulator::{self, Mode};
use super::guest::{
    Guest, forget_others, make_ram, make_slot, open_ram, open_to_use, others_record, record_there,
    refuse_used,
};
use super::place::{
    Config, Guests, Place, VERSION, check_own_dir, image_number, is_hugetlbfs, make_own_dir, remove_if_there,
};
use super::pooled::{self, PoolFile};
use crate::cli::wsp::{Accel, RAM_BYTES_UNIT, WspStart};
use crate::failure::{Failure, Output, Result};
use crate::size::Size;
use crate::target::show;

const SITE: &str = "wsp::start";
/// How much of a device is looked at for what others have there: file systems begin within 68 KiB, arrays within 8, partitions
/// within 34.
const FOREIGN_BYTES: usize = 128 << 10;

pub fn run(guests: &Guests, args: &WspStart) -> Result<()> {
    let place = guests.place(&args.name);
    let is_new = !place.dir.exists();
    place.make()?;
    let _lock = place.lock()?;
    start(&place, args).inspect_err(|_| {
        // What was there before is somebody's, whether it is understood or not.
        if is_new && !place.is_alive() && place.config().is_err() {
            remove_if_empty(&place);
        }
    })
}

fn start(place: &Place, args: &WspStart) -> Result<()> {
    if place.is_alive() {
        return Err(Failure::failed(format_args!("guest {} runs already", place.name)));
    }
    let before = place.config().ok();
    // One whose description cannot be read may have images that were put aside.
    let is_first = !["guest.json", "slots"].iter().any(|name| place.dir.join(name).exists());
    if before.as_ref().is_some_and(|before| before.clone_of.is_some()) {
        return Err(Failure::failed(format_args!(
            "guest {} is a clone: resume its original again, or remove the clone first",
            place.name
        )));
    }
    let mut config = match (&before, args.ram.is_some() || args.media.is_some()) {
        (_, true) => described(place, args)?,
        (Some(config), false) => config.clone(),
        (None, false) => {
            return Err(Failure::usage(format_args!(
                "there is no guest {} yet: give --ram and --media",
                place.name
            )));
        }
    };
    let of_guest = |e: Error| {
        let (guest, said) = (format!("guest {}: ", place.name), e.to_string());
        Failure::failed(if said.starts_with(&guest) { said } else { guest + &said })
    };
    if let Some(before) = &before {
        keeps_formats(place, before, &config)?;
        discards_nothing(place, before, args.fresh)?;
    }
    boot(place, &mut config, before.as_ref(), args.fresh).map_err(|e| {
        if is_first {
            forget_first_start(place, &config);
        }
        of_guest(e)
    })?;
    let mut out = Output::new();
    match args.json {
        true => out.json(&json!({
            "name": place.name, "state": "running", "accelerator": config.accel, "ram": config.ram,
            "ram_offset": config.ram_offset, "ram_bytes": config.ram_bytes, "memory": config.memory(),
            "slots": config.slots,
        }))?,
        false => out.line(format_args!(
            "{} runs ({}), its memory is {}",
            place.name,
            config.accel,
            config.memory()
        ))?,
    }
    out.finish()
}

/// A guest that never was leaves nothing behind.
fn remove_if_empty(place: &Place) {
    let _ = std::fs::remove_file(place.dir.join("lock"));
    let _ = std::fs::remove_file(place.dir.join("alive"));
    let _ = std::fs::remove_dir(&place.dir);
}

/// Removes what the first start of a guest made before it was refused: nobody has anything in it yet.
fn forget_first_start(place: &Place, config: &Config) {
    // An emulator that does not end has its memory.
    if place.is_alive() {
        return;
    }
    // It is described once its memory is its own. Before, what is there may be somebody else's.
    if place.config().is_ok() && forget(config).is_ok() {
        let _ = std::fs::remove_dir_all(&place.dir);
    }
    // Where there is anything in it, it is not this start's.
    let _ = std::fs::remove_dir(&config.slots);
}

/// Boots a guest that does not run: whatever image there was is gone.
pub fn boot(
    place: &Place,
    config: &mut Config,
    before: Option<&Config>,
    fresh: bool,
) -> lodestone::Result<()> {
    // Whatever is asked for: a guest's memory is not overwritten under it.
    refuse_used(config)?;
    check_own_dir(&config.slots)?;
    // Of a guest that an older version booted.
    if config.formats.len() != config.disks.len() {
        config.formats = config.disks.iter().map(|disk| emulator::format_of(disk).to_string()).collect();
    }
    let was_made = take_place(config, before)?;
    let memory = || {
        let ours = before.filter(|before| before.ram == config.ram && before.ram_offset == config.ram_offset);
        let others = ours.map_or(Ok(None), others_record);
        let others = if fresh { others.unwrap_or_default() } else { others? };
        let is_lost = others.as_ref().is_some_and(|record| record.state == State::Suspended);
        // Memory of another guest, or of one whose description is lost.
        if !fresh && (ours.is_none() || is_lost) && config.ram.exists() {
            foreign(config)?;
        }
        match before {
            // However it was called: what is in the pool stays in its place.
            Some(before) if ours.is_some() && config.pooled.is_some() => forget_slots(before)?,
            Some(before) => forget(before)?,
            None => {}
        }
        // A device stays, and where it was the guest's before, and as long, it was looked through then.
        let is_known = ours.is_some_and(|ours| ours.image.is_some() && ours.ram_bytes == config.ram_bytes);
        if config.pooled.is_none() && (others.is_some() || !is_known) {
            forget_others(config)?;
        }
        make_own_dir(&config.slots)?;
        // In a pool it is there already; elsewhere it is made now.
        let (media, used) = open_to_use(config, || make_ram(config, fresh || ours.is_some()))?;
        let ram = Ram::new(&media, config.ram_bytes)?;
        let mut image = [0; 16];
        rustix::rand::getrandom(&mut image, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::message(e.raw_os_error(), SITE, "the kernel gives no random numbers"))?;
        ram.begin(image)?;
        make_slot(config, 1).map(|()| (image, used))
    };
    let made = memory();
    let described = made.and_then(|(image, used)| {
        (config.image, config.failed) = (Some(image_number(image)), 0);
        write_config(place, config).map(|()| used)
    });
    let used = described.inspect_err(|_| {
        // Nobody would know of it.
        if let Some(file) = config.pooled.as_ref().filter(|_| was_made) {
            let _ = file.remove(config.ram_number);
        }
    })?;
    let mut guest = Guest::new(config, place, Mode::Boot, used);
    guest.spawn()?;
    guest.go_on().map_err(|e| guest.did_not_start(e))
}

/// Has the pool say where the guest's memory is, and makes it there if it is not: whether it was.
fn take_place(config: &mut Config, before: Option<&Config>) -> lodestone::Result<bool> {
    let bytes = config.ram_bytes + config.trailer_bytes;
    let Some(file) = &config.pooled else { return Ok(false) };
    let is_before = |before: &&Config| before.pooled.as_ref() == Some(file);
    if let Some(other_size) = before.filter(is_before).filter(|b| b.part().is_none_or(|p| p.bytes != bytes)) {
        forget(other_size)?;
    }
    let (fixed, was_made) = file.make(bytes)?;
    (config.ram, config.ram_offset, config.ram_number) = (fixed.path, fixed.offset, fixed.number);
    Ok(was_made)
}

fn write_config(place: &Place, config: &Config) -> lodestone::Result<()> {
    place.write_config(config).map_err(|failure| match failure {
        Failure::Failed(message) => Error::message(libc::EIO, SITE, message),
        _ => Error::new(libc::EIO, SITE),
    })
}

/// Removes memory and slots, where they are files, and the guest's own.
pub fn forget(config: &Config) -> lodestone::Result<()> {
    check_own_dir(&config.slots)?;
    // This may be refused, and then nothing is lost.
    if let Some(file) = &config.pooled {
        file.remove(config.ram_number)?;
        return forget_slots(config);
    }
    // Who cannot look was asked before whether all of it may go.
    if others_record(config).is_ok_and(|record| record.is_some()) {
        // Slots that lie beside it are that guest's, too.
        let is_beside = config.ram.parent() == Some(&config.slots);
        return if is_beside { Ok(()) } else { forget_slots(config) };
    }
    refuse_used(config)?;
    forget_slots(config)?;
    match config.ram.is_file() {
        true => remove(&config.ram),
        false => Ok(()),
    }
}

pub fn remove(path: &Path) -> lodestone::Result<()> {
    remove_if_there(path).map_err(|e| Error::io(e, SITE, "cannot remove", path))
}

fn forget_slots(config: &Config) -> lodestone::Result<()> {
    if let Ok(entries) = std::fs::read_dir(&config.slots) {
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("slot.")) {
                remove(&path)?;
            }
        }
    }
    Ok(())
}

/// Refuses memory that somebody's guest, or anything else, is in.
fn foreign(config: &Config) -> lodestone::Result<()> {
    let refused = |what: &str| {
        let message = format!("{} {what}: use another place, or --fresh to overwrite it", config.memory());
        Err(Error::message(libc::EEXIST, SITE, message))
    };
    let about = std::fs::metadata(&config.ram);
    let is_file = config.pooled.is_none() && about.as_ref().is_ok_and(|about| about.is_file());
    if let Ok(about) = about
        && is_file
        && about.len() == 0
    {
        let is_ours = about.uid() == rustix::process::geteuid().as_raw();
        return if is_ours { Ok(()) } else { refused("is somebody else's") };
    }
    let media = open_ram(config)?;
    let record = match is_file {
        // It ends with the record, as it was made. All of what may be anything else, and large, is not looked through.
        true => {
            let bytes = media.len() / RAM_BYTES_UNIT * RAM_BYTES_UNIT;
            Ram::new(&media, bytes).map_or(Ok(None), |ram| ram.record())?
        }
        false => record::of_any_size(&media, RAM_BYTES_UNIT)?,
    };
    match record {
        Some(record) => refused(&format!("has the memory of a guest that is {}", record.state.name())),
        None if is_file => refused("exists"),
        None => {
            let mut first = vec![0; FOREIGN_BYTES.min(media.len() as usize)];
            media.read(Addr(0), &mut first)?;
            if first.iter().all(|byte| *byte == 0) { Ok(()) } else { refused("holds something") }
        }
    }
}

/// A suspended guest is not lost by a boot that nobody meant.
fn discards_nothing(place: &Place, config: &Config, fresh: bool) -> Result<()> {
    if fresh {
        return Ok(());
    }
    match record_there(config) {
        // Its slot, too, may only be away.
        Ok(Some(record)) if record.state == State::Suspended => Err(Failure::failed(format_args!(
            "guest {} is suspended (generation {}): resume it, or lose that with --fresh",
            place.name, record.generation
        ))),
        Ok(_) => Ok(()),
        Err(e) if e.errno() == libc::EBUSY => Err(Failure::failed(format_args!("guest {}: {e}", place.name))),
        Err(e) => Err(Failure::failed(format_args!(
            "guest {}: whether it is suspended cannot be told: {e}; mend that, or lose what may be there with --fresh",
            place.name
        ))),
    }
}

/// A disk that was raw is not taken for anything else because of what its guest may have written there.
fn keeps_formats(place: &Place, before: &Config, config: &Config) -> Result<()> {
    let former = |disk: &PathBuf| before.disks.iter().zip(&before.formats).find(|(path, _)| *path == disk);
    let changed = config.disks.iter().zip(&config.formats).find(|(disk, format)| {
        format.as_str() != "raw" && former(disk).is_some_and(|(_, former)| former == "raw")
    });
    match changed {
        None => Ok(()),
        Some((disk, format)) => Err(Failure::failed(format_args!(
            "guest {}: its disk {} is raw, and begins as {format} does, which the guest may have written: if it is to be \
             {format}, remove the guest first (lode wsp rm)",
            place.name,
            show(disk)
        ))),
    }
}

/// What the command line says of a guest.
fn described(place: &Place, args: &WspStart) -> Result<Config> {
    let (Some(ram_bytes), Some(media)) = (args.ram, &args.media) else {
        return Err(Failure::usage("a guest has both --ram and --media"));
    };
    let absolute = |path: &Path| {
        let found = std::path::absolute(path);
        let found = found.map_err(|e| Failure::failed(format_args!("cannot find {}: {e}", show(path))))?;
        match found.to_str() {
            Some(_) => Ok(found),
            None => Err(Failure::usage(format_args!("{}: QEMU takes no path that is not UTF-8", show(path)))),
        }
    };
    let pooled = PoolFile::of(&place.name, media)?;
    let (ram, slots, trailer_bytes) = match &pooled {
        // Where it lies, its pool will say.
        Some(_) => (PathBuf::new(), place.dir.join("slots"), TRAILER_BYTES),
        None => layout(place, &absolute(media)?)?,
    };
    if let Ok(Some(align)) = device_align(&ram)
        && !ram_bytes.is_multiple_of(align)
    {
        return Err(Failure::usage(format_args!(
            "{} is mapped in pieces of {}: give --ram a multiple of that",
            show(&ram),
            Size(align)
        )));
    }
    let options = args.options.iter().map(|option| option.to_str().map(str::to_string));
    let options: Option<Vec<String>> = options.collect();
    let Some(options) = options else {
        return Err(Failure::usage("QEMU takes no option that is not UTF-8"));
    };
    if let Some(why) = emulator::refused_option(&options) {
        return Err(Failure::usage(why));
    }
    if let Some(why) = pooled.as_ref().and_then(|_| pooled::refused(&args.qemu, &options)) {
        return Err(Failure::failed(why));
    }
    let disks: Result<Vec<PathBuf>> = args.disks.iter().map(|disk| absolute(disk)).collect();
    let disks = disks?;
    if let Some(missing) = disks.iter().find(|disk| !disk.exists()) {
        return Err(Failure::failed(format_args!("the disk {} does not exist", show(missing))));
    }
    let accel = match args.accel {
        Accel::Auto => emulator::accelerator(&args.qemu, &place.dir),
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
    };
    let cwd = std::env::current_dir()
        .map_err(|e| Failure::failed(format_args!("cannot find the working directory: {e}")))?;
    Ok(Config {
        version: VERSION,
        qemu: args.qemu.clone(),
        accel: accel.to_string(),
        ram,
        ram_bytes,
        trailer_bytes,
        ram_offset: 0,
        pooled,
        ram_number: 0,
        slots,
        image: None,
        assume: args.assume.map(|domain| domain.domain().name().to_string()),
        formats: disks.iter().map(|disk| emulator::format_of(disk).to_string()).collect(),
        disks,
        cpus: args.cpus,
        priority: args.priority,
        agent: args.agent,
        cwd,
        options,
        clone_of: None,
        own_disks: false,
        failed: 0,
    })
}

/// Where memory and slots lie, and how much stands behind memory.
fn layout(place: &Place, media: &Path) -> Result<(PathBuf, PathBuf, u64)> {
    let about = std::fs::metadata(media);
    let beside = place.dir.join("slots");
    match &about {
        Ok(about) if about.is_dir() => match is_hugetlbfs(media) {
            // Its files are memory only, and in whole pages.
            Some(page) => Ok((media.join(format!("{}.ram", place.name)), beside, page)),
            None => {
                let dir = media.join(format!("{}.wsp", place.name));
                Ok((dir.join("ram"), dir, TRAILER_BYTES))
            }
        },
        Ok(about) if about.is_file() => Ok((media.to_path_buf(), beside, TRAILER_BYTES)),
        // A device is mapped in whole pages of its own.
        Ok(_) => Ok((media.to_path_buf(), beside, 2 << 20)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && media.parent().is_some_and(Path::is_dir) => {
            Ok((media.to_path_buf(), beside, TRAILER_BYTES))
        }
        Err(e) => Err(Failure::failed(format_args!("cannot use {}: {e}", show(media)))),
    }
}
