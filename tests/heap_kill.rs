//! A process that uses a persistent heap is killed with SIGKILL, again and again: what it had acknowledged is there, the
//! operation under way happened wholly or not at all, and nothing is leaked.
//!
//! The process is this test itself, started with `LODE_HEAP_KILL` set; it uses the map of `examples/heap`. Acknowledged
//! is what came through its standard output. `LODE_HEAP_KILLS` is how often it is killed.

#[path = "../examples/heap/map.rs"]
mod map;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use lodestone::media::{Domain, Span};
use lodestone::sim::media::Rng;
use lodestone::wsp::heap::{CreateOptions, Heap, OpenOptions};
use map::Map;

const HEAP_BYTES: u64 = 8 << 20;
const KEYS: u64 = 200;
/// Between one acknowledgement and the next.
const ACK: &str = "ack ";

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn options(assume: Option<Domain>) -> OpenOptions {
    OpenOptions { assume, prefault: false }
}

fn domain(name: &str) -> Option<Domain> {
    name.parse().ok()
}

/// The `n`th operation: a key, and a value if it is to be there.
fn operation(n: u64) -> (Vec<u8>, Option<Vec<u8>>) {
    let mut rng = Rng::new(n);
    let key = format!("key {}", rng.below(KEYS)).into_bytes();
    let bytes = [3, 30, 100, 700, 3000, 20_000][rng.below(6) as usize];
    let value = (rng.below(4) > 0).then(|| vec![n as u8; bytes as usize]);
    (key, value)
}

fn on_model(model: &mut Model, n: u64) {
    match operation(n) {
        (key, Some(value)) => drop(model.insert(key, value)),
        (key, None) => drop(model.remove(&key)),
    }
}

/// What the killed process does: from the operation on that its environment names, for ever.
#[test]
fn goes_on_until_it_is_killed() {
    let Ok(task) = std::env::var("LODE_HEAP_KILL") else { return };
    let [path, first, assume] = task.split('|').collect::<Vec<_>>()[..] else { panic!("{task}") };
    let heap = Heap::open_path(Path::new(path), &options(domain(assume))).unwrap();
    let mut map = Map::of(heap).unwrap();
    let mut out = std::io::stdout().lock();
    for n in first.parse::<u64>().unwrap().. {
        match operation(n) {
            (key, Some(value)) => map.put(&key, &value).unwrap(),
            (key, None) => drop(map.remove(&key).unwrap()),
        }
        out.write_all(format!("\n{ACK}{n}\n").as_bytes()).unwrap();
        out.flush().unwrap();
    }
}

/// Starts it and kills it after some time. The last operation that it acknowledged.
fn killed(path: &Path, first: u64, assume: &str, after: Duration) -> Option<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["goes_on_until_it_is_killed", "--exact", "--nocapture", "--test-threads", "1"])
        .env("LODE_HEAP_KILL", format!("{}|{first}|{assume}", path.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(after);
    child.kill().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let acked = out.lines().map_while(Result::ok).filter_map(|l| l.strip_prefix(ACK)?.parse().ok()).last();
    let status = child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL), "{status:?}");
    acked
}

fn held(map: &Map<Span>) -> Model {
    let mut all = Model::new();
    map.for_each(|key, value| assert!(all.insert(key, value).is_none(), "a key is there twice")).unwrap();
    all
}

/// One heap, killed so often. How many operations were acknowledged, and how many were done that were not.
fn campaign(path: &Path, assume: &str, kills: u64, seed: u64) -> (u64, u64) {
    let create =
        CreateOptions { size: Some(HEAP_BYTES), open: options(domain(assume)), ..CreateOptions::default() };
    Map::of(Heap::create(path, &create).unwrap()).unwrap().heap.close().unwrap();
    let mut rng = Rng::new(seed);
    let (mut model, mut next, mut unacked) = (Model::new(), 0, 0);
    for kill in 0..kills {
        let after = Duration::from_micros(2_000 + rng.below(60_000));
        let last = killed(path, next, assume, after);
        for n in next..last.map_or(next, |last| last + 1) {
            on_model(&mut model, n);
        }
        next = last.map_or(next, |last| last + 1);
        let heap = Heap::open_path(path, &options(domain(assume))).unwrap();
        let map = Map::of(heap).unwrap();
        map.check().unwrap_or_else(|e| panic!("kill {kill}, seed {seed}: {e}"));
        let found = held(&map);
        if found != model {
            on_model(&mut model, next);
            assert!(
                found == model,
                "kill {kill}, seed {seed}: operation {next} was cut short, others are missing"
            );
            next += 1;
            unacked += 1;
        }
        for (key, value) in found.iter().take(20) {
            assert_eq!(map.get(key).unwrap().as_ref(), Some(value), "it is in the map and cannot be found");
        }
        // Every third time it is closed as it should be.
        if kill % 3 == 0 {
            map.heap.close().unwrap();
        }
    }
    (next, unacked)
}

#[test]
fn a_killed_process_loses_nothing_that_it_acknowledged() {
    if std::env::var_os("LODE_HEAP_KILL").is_some() {
        return;
    }
    let kills = std::env::var("LODE_HEAP_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(30);
    let seed = std::env::var("LODE_CRASH_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    for assume in ["detected", "memory", "cpu-cache"] {
        let path: PathBuf =
            std::env::temp_dir().join(format!("lode-heap-kill-{}-{assume}", std::process::id()));
        let (acked, unacked) = campaign(&path, assume, kills, seed);
        println!("{assume}: {kills} kills, {acked} operations, {unacked} of them not acknowledged and done");
        assert!(acked > kills, "nothing was acknowledged between the kills");
        std::fs::remove_file(&path).unwrap();
    }
}
