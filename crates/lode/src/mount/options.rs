//! Mount options: the words after `-o`, and the arguments of a mount helper.
//!
//! mount(8) hands its own words on (`rw`, `_netdev`, `x-systemd.automount` ...), so those are known here:
//! some are flags of the kernel's mount, some are for mount(8) alone and mean nothing to us. A word that
//! nobody knows is an error, because a misspelt option that is silently dropped shows only when it is
//! missed; mount(8)'s `-s` (sloppy) asks for the opposite.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lodestone::media::Domain;
use lodestone::mover::class::{Class, UnknownClass};
use lodestone::mover::manager::{Qos, UnknownQos};
use lodestone::mover::{EngineKind, UnknownEngine};
use rustix::mount::MountFlags;

use super::MountOptions;
use crate::door::Cache;
use crate::live::address::Address;

/// More threads than this gain nothing: the kernel's queue of requests is one.
const THREADS_DEFAULT_MAX: usize = 8;
const THREADS_MAX: usize = 256;
const WRITE_BYTES_DEFAULT: u32 = 1 << 20;
/// Least and most bytes of one request: a page, and what the kernel's page limit allows by default.
const REQUEST_BYTES: std::ops::RangeInclusive<u32> = 4096..=(1 << 20);

/// All that the words said.
#[derive(Clone, Debug)]
pub struct Options {
    pub flags: MountFlags,
    pub allow_other: bool,
    /// The mount point may hold something, which is then covered.
    pub nonempty: bool,
    pub threads: usize,
    pub cache: Cache,
    pub assume: Option<Domain>,
    pub engine: EngineKind,
    /// What is wanted of copies; none: as each caller's I/O priority says.
    pub class: Option<Class>,
    pub qos: Qos,
    /// The file that says what engines are worth.
    pub profile: Option<PathBuf>,
    /// Where metrics are served, if they are.
    pub metrics: Option<Address>,
    pub read_bytes_max: Option<u32>,
    pub write_bytes_max: u32,
}

impl Options {
    pub fn read_only(&self) -> bool {
        self.flags.contains(MountFlags::RDONLY)
    }

    /// `lists` as they were given, each with commas; later words win. `sloppy` ignores unknown ones.
    pub fn parse(lists: &[OsString], sloppy: bool) -> Result<Options, String> {
        let mut options = Options {
            flags: MountFlags::empty(),
            allow_other: rustix::process::geteuid().is_root(),
            nonempty: false,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_DEFAULT_MAX)),
            cache: Cache::default(),
            assume: None,
            engine: EngineKind::Cpu,
            class: None,
            qos: Qos::default(),
            profile: None,
            metrics: None,
            read_bytes_max: None,
            write_bytes_max: WRITE_BYTES_DEFAULT,
        };
        for list in lists {
            let list = list.to_str().ok_or_else(|| format!("mount options are not UTF-8: {list:?}"))?;
            for word in list.split(',').filter(|w| !w.is_empty()) {
                if !options.take(word)? && !sloppy {
                    return Err(format!("unknown mount option '{word}'"));
                }
            }
        }
        Ok(options)
    }

    /// False where nobody knows the word.
    fn take(&mut self, word: &str) -> Result<bool, String> {
        if let Some((flag, on)) = kernel_flag(word) {
            self.flags.set(flag, on);
            return Ok(true);
        }
        let (key, value) = word.split_once('=').map_or((word, None), |(k, v)| (k, Some(v)));
        let bad_qos = |e: UnknownQos| format!("mount option '{word}': {e}");
        match (key, value) {
            ("allow_other", None) => self.allow_other = true,
            ("nonempty", None) => self.nonempty = true,
            ("threads", Some(v)) => self.threads = number(word, v, 1..=THREADS_MAX as u32)? as usize,
            ("cache", Some(v)) => self.cache = cache(v)?,
            ("engine", Some(v)) => {
                self.engine = v.parse().map_err(|e: UnknownEngine| format!("mount option '{word}': {e}"))?;
            }
            ("class", Some(v)) => {
                let class = v.parse().map_err(|e: UnknownClass| format!("mount option '{word}': {e}"))?;
                self.class = Some(class);
            }
            ("floor", Some(v)) => self.qos.set_floor(v).map_err(bad_qos)?,
            ("starve", Some(v)) => self.qos.set_starve(v).map_err(bad_qos)?,
            ("profile", Some(v)) if !v.is_empty() => self.profile = Some(PathBuf::from(v)),
            ("assume", Some(v)) => self.assume = Some(domain(v)?),
            ("max_read", Some(v)) => self.read_bytes_max = Some(number(word, v, REQUEST_BYTES)?),
            ("max_write", Some(v)) => self.write_bytes_max = number(word, v, REQUEST_BYTES)?,
            ("metrics", Some(v)) => {
                self.metrics = Some(v.parse().map_err(|e| format!("mount option '{word}': {e}"))?);
            }
            _ => return Ok(is_for_mount(key)),
        }
        Ok(true)
    }
}

/// Words that are flags of the mount itself, and whether they set or clear one.
fn kernel_flag(word: &str) -> Option<(MountFlags, bool)> {
    Some(match word {
        "ro" => (MountFlags::RDONLY, true),
        "rw" => (MountFlags::RDONLY, false),
        "nosuid" => (MountFlags::NOSUID, true),
        "suid" => (MountFlags::NOSUID, false),
        "nodev" => (MountFlags::NODEV, true),
        "dev" => (MountFlags::NODEV, false),
        "noexec" => (MountFlags::NOEXEC, true),
        "exec" => (MountFlags::NOEXEC, false),
        "noatime" => (MountFlags::NOATIME, true),
        "atime" => (MountFlags::NOATIME, false),
        "nodiratime" => (MountFlags::NODIRATIME, true),
        "diratime" => (MountFlags::NODIRATIME, false),
        "relatime" => (MountFlags::RELATIME, true),
        "norelatime" => (MountFlags::RELATIME, false),
        "strictatime" => (MountFlags::STRICTATIME, true),
        "nostrictatime" => (MountFlags::STRICTATIME, false),
        "sync" => (MountFlags::SYNCHRONOUS, true),
        "async" => (MountFlags::SYNCHRONOUS, false),
        "dirsync" => (MountFlags::DIRSYNC, true),
        _ => return None,
    })
}

/// Words that mount(8) and systemd act on by themselves, and `default_permissions`, which always holds.
fn is_for_mount(key: &str) -> bool {
    let words = [
        "default_permissions",
        "defaults",
        "auto",
        "noauto",
        "user",
        "nouser",
        "users",
        "owner",
        "group",
        "nofail",
        "_netdev",
        "comment",
    ];
    words.contains(&key) || key.starts_with("x-") || key.starts_with("X-")
}

fn number(word: &str, value: &str, range: std::ops::RangeInclusive<u32>) -> Result<u32, String> {
    value.parse().ok().filter(|n| range.contains(n)).ok_or_else(|| {
        format!("mount option '{word}': a number from {} to {} is wanted", range.start(), range.end())
    })
}

fn cache(value: &str) -> Result<Cache, String> {
    match value {
        "auto" => Ok(Cache::Auto),
        "none" => Ok(Cache::None),
        "always" => Ok(Cache::Always),
        _ => Err(format!("mount option 'cache={value}': auto, none or always is wanted")),
    }
}

fn domain(value: &str) -> Result<Domain, String> {
    match value {
        "memory" => Ok(Domain::Memory),
        "cpu-cache" => Ok(Domain::CpuCache),
        "page-cache" => Ok(Domain::PageCache),
        _ => Err(format!("mount option 'assume={value}': memory, cpu-cache or page-cache is wanted")),
    }
}

/// What a mount helper was asked for. mount(8) calls `mount.fuse.lode POOL DIR [-sfnv] [-N NS] [-t TYPE]
/// [-o OPTS]`; where only fuse3's own helper is installed, that one calls `lode POOL DIR -o OPTS`.
///
/// None where `arguments` (the program's name first) are no helper's. `is_command` knows the subcommands.
pub fn helper(
    arguments: &[OsString],
    is_command: impl Fn(&str) -> bool,
) -> Option<Result<MountOptions, String>> {
    let name = Path::new(arguments.first()?).file_name()?;
    let is_helper = name == "mount.fuse.lode" || name == "mount.lode";
    let is_called_by_fuse = || match arguments.get(1..) {
        Some([pool, dir, rest @ ..]) => {
            let is_plain = |word: &OsString| !word.as_bytes().starts_with(b"-");
            // It always passes options; without them two words are more likely a misspelt command.
            let has_options = rest.first().is_some_and(|w| w == "-o");
            is_plain(pool) && is_plain(dir) && has_options && !pool.to_str().is_some_and(&is_command)
        }
        _ => false,
    };
    (is_helper || is_called_by_fuse()).then(|| helper_arguments(&arguments[1..]))
}

fn helper_arguments(arguments: &[OsString]) -> Result<MountOptions, String> {
    let mut request = MountOptions::default();
    let mut places = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.to_str() {
            Some("-o") => request.options.push(rest.next().ok_or("-o: options are missing")?.clone()),
            Some("-t" | "-N") => {
                rest.next().ok_or_else(|| format!("{}: an argument is missing", argument.display()))?;
            }
            Some(flags) if flags.len() > 1 && flags.starts_with('-') => {
                for flag in flags[1..].chars() {
                    match flag {
                        's' => request.sloppy = true,
                        'f' => request.fake = true,
                        // Whether to write mtab, and to talk: there is no mtab and nothing to say.
                        'n' | 'v' => {}
                        _ => return Err(format!("unknown option '{flags}'")),
                    }
                }
            }
            _ => places.push(argument),
        }
    }
    let [pool, dir] = places[..] else { return Err("a pool and a directory are wanted".to_owned()) };
    request.pool = pool.clone();
    request.dir = PathBuf::from(dir);
    Ok(request)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lodestone::mover::class::Owner;
    use proptest::prelude::*;

    use super::*;

    fn parse(list: &str) -> Result<Options, String> {
        Options::parse(&[OsString::from(list)], false)
    }

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn what_mount_and_fstab_pass_is_known() {
        let line = "rw,nosuid,nodev,noexec,noatime,_netdev,nofail,x-systemd.automount,user=me,auto,defaults";
        let options = parse(line).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
        assert_eq!(options.flags, flags);
    }

    #[test]
    fn the_later_word_wins() {
        assert!(!parse("ro,rw").unwrap().read_only());
        assert!(parse("rw,ro").unwrap().read_only());
    }

    #[test]
    fn our_own_words() {
        let o = parse(
            "threads=3,cache=none,engine=delegate,assume=cpu-cache,max_read=8192,max_write=65536,nonempty,profile=/p.toml,class=bandwidth:7,floor=25,starve=40,metrics=[::1]:9847",
        )
        .unwrap();
        assert_eq!(o.metrics, Some(Address::Tcp("[::1]:9847".to_owned())));
        assert_eq!(o.class, Some(Class::Bandwidth(Owner::of(7))));
        let starve_max = Duration::from_millis(40);
        assert_eq!(o.qos, Qos { floor_percent: 25, starve_max, ..Qos::default() });
        assert_eq!(o.profile.as_deref(), Some(Path::new("/p.toml")));
        assert_eq!((o.threads, o.cache, o.assume), (3, Cache::None, Some(Domain::CpuCache)));
        assert_eq!((o.read_bytes_max, o.write_bytes_max, o.nonempty), (Some(8192), 65536, true));
    }

    #[test]
    fn wrong_words_are_named() {
        for (list, part) in [
            ("frobnicate", "'frobnicate'"),
            ("threads=0", "threads=0"),
            ("threads=many", "threads=many"),
            ("threads", "'threads'"),
            ("profile", "'profile'"),
            ("profile=", "'profile='"),
            ("cache=often", "auto, none or always"),
            ("assume=luck", "assume=luck"),
            (
                "engine=gpu",
                "there is no engine 'gpu': cpu, semaphore, delegate, dsa, ioat, emu, emu-ioat are wanted",
            ),
            ("class=fast", "there is no class 'fast': latency, bandwidth or bandwidth:OWNER"),
            ("floor=0", "1 to 90 are wanted"),
            ("floor=most", "class bandwidth cannot keep 'most' percent"),
            ("starve=0", "1 to 60000 are wanted"),
            ("starve=60001", "'60001' milliseconds"),
            ("starve=2ms", "class bandwidth cannot wait for '2ms' milliseconds at most"),
            ("starve", "'starve'"),
            ("max_write=17", "4096"),
            ("metrics", "'metrics'"),
            ("metrics=:9000", "write HOST:PORT"),
            ("ro=1", "'ro=1'"),
        ] {
            let said = parse(list).unwrap_err();
            assert!(said.contains(part), "{list}: {said}");
        }
        assert!(Options::parse(&[OsString::from("frobnicate,ro")], true).unwrap().read_only());
    }

    proptest! {
        /// Of any words each is known, or ignored where that is asked for, or named in the reason.
        #[test]
        fn any_words_are_taken_or_named(words in proptest::collection::vec(any_word(), 0..6)) {
            let list = words.join(",");
            if let Err(said) = parse(&list) {
                prop_assert!(words.iter().any(|word| said.contains(word.as_str())), "{}: {}", list, said);
            }
            let refused = |word: &String| !word.is_empty() && parse(word).is_err();
            prop_assert_eq!(parse(&list).is_err(), words.iter().any(refused));
        }
    }

    /// Anything, or one of our own keys with anything behind it.
    fn any_word() -> impl Strategy<Value = String> {
        const KEYS: [&str; 12] = [
            "threads",
            "cache",
            "engine",
            "class",
            "floor",
            "starve",
            "profile",
            "assume",
            "max_read",
            "max_write",
            "metrics",
            "ro",
        ];
        prop_oneof![
            "[^,]{0,12}",
            (proptest::sample::select(&KEYS[..]), "=?", "[^,]{0,8}")
                .prop_map(|(key, sign, value)| key.to_owned() + &sign + &value),
            (proptest::sample::select(&KEYS[..]), 0..100_000u32)
                .prop_map(|(key, number)| format!("{key}={number}")),
        ]
    }

    #[test]
    fn helpers_are_known_by_name_and_by_shape() {
        let none = |_: &str| false;
        let got = helper(&words("/sbin/mount.fuse.lode p d -n -sv -t fuse.lode -o ro,x -N 7"), none);
        let got = got.unwrap().unwrap();
        assert_eq!((got.pool.to_str(), got.dir.to_str()), (Some("p"), Some("d")));
        assert_eq!(got.options, ["ro,x"]);
        assert!(got.sloppy && !got.fake && !got.foreground);

        assert!(helper(&words("lode a.pool /mnt -o rw"), none).unwrap().is_ok());
        let is_mount = |w: &str| w == "mount";
        assert!(helper(&words("lode mount p d"), is_mount).is_none());
        assert!(helper(&words("lode --help"), is_mount).is_none());
        assert!(helper(&words("lode munt p"), is_mount).is_none());
        assert!(helper(&words("mount.lode p"), none).unwrap().is_err());
        assert!(helper(&words("mount.lode p d -x"), none).unwrap().is_err());
    }
}
