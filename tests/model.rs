//! Random operations on the production code and on the oracle, in step: answers and whole trees must agree, with
//! clean closes and power failures in between. `PROPTEST_CASES` chooses how many.

use lodestone::fs::{DataMode, Fs, MkfsOptions};
use lodestone::limits::POOL_BYTES_MIN;
use lodestone::media::Domain;
use lodestone::sim::machine::Machine;
use lodestone::sim::media::{Keep, SimMedia};
use lodestone::sim::model::{Falloc, Model, Rename, Setting, Target};
use lodestone::sim::workload::{Op, Special};
use proptest::prelude::*;
use proptest::sample::select;

const OPS: usize = 100;
const SLOTS: u8 = 3;

fn path() -> impl Strategy<Value = String> {
    let names = [
        "foo", "bar", "A", "B", "A/foo", "A/bar", "B/foo", "B/bar", "A/C", "A/C/foo", "A/C/D", "ln", "A/ln",
        "ln/foo", "B/C", "A/.", "B/..",
    ];
    // The root's names most of all, or nothing would be there to work with.
    select(names.to_vec()).prop_map(str::to_owned)
}

/// A path whose last name is not "." or "..", whose errors depend on who asks.
fn name() -> impl Strategy<Value = String> {
    path().prop_filter("a name", |p| !p.ends_with('.'))
}

fn target() -> impl Strategy<Value = Target> {
    prop_oneof![3 => path().prop_map(Target::Path), 1 => (0..SLOTS).prop_map(Target::Slot)]
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![select(vec![0, 1, 63, 64, 4095, 4096, 4097, 8192]), 0..20_000u64]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![select(vec![1, 7, 9, 63, 65, 4095, 4096, 4097, 16384]), 0..6000usize]
}

fn operation() -> impl Strategy<Value = Op> {
    let special = select(vec![Special::Fifo, Special::CharDevice, Special::Socket]);
    let rename =
        select(vec![Rename::Plain, Rename::Plain, Rename::NoReplace, Rename::Exchange, Rename::Whiteout]);
    let falloc = select(vec![
        Falloc::Reserve,
        Falloc::ReserveKeepSize,
        Falloc::Punch,
        Falloc::Zero,
        Falloc::ZeroKeepSize,
    ]);
    let setting = select(vec![Setting::Any, Setting::Any, Setting::Create, Setting::Replace]);
    let xattr = select(vec!["user.a", "user.b", "user.long-name-of-an-attribute"]).prop_map(str::to_owned);
    let points_to =
        select(vec!["foo", "A", "A/foo", "/B", "ln", "../bar", "nowhere"]).prop_map(str::to_owned);
    prop_oneof![
        4 => name().prop_map(Op::Create),
        4 => name().prop_map(Op::Mkdir),
        1 => (name(), special).prop_map(|(p, s)| Op::Mknod(p, s)),
        2 => (points_to, name()).prop_map(|(t, p)| Op::Symlink(t, p)),
        3 => (target(), name()).prop_map(|(t, p)| Op::Link(t, p)),
        3 => name().prop_map(Op::Unlink),
        2 => name().prop_map(Op::Rmdir),
        6 => (name(), name(), rename).prop_map(|(a, b, how)| Op::Rename(a, b, how)),
        2 => (0..SLOTS, path(), any::<bool>()).prop_map(|(s, p, t)| Op::Open(s, p, t)),
        1 => (0..SLOTS, path()).prop_map(|(s, p)| Op::Tmpfile(s, p)),
        1 => (0..SLOTS).prop_map(Op::Close),
        6 => (target(), offset(), length()).prop_map(|(t, at, len)| Op::Write(t, at, len)),
        4 => (target(), length()).prop_map(|(t, len)| Op::Append(t, len)),
        2 => (target(), offset(), length()).prop_map(|(t, at, len)| Op::WriteBack(t, at, len)),
        4 => (target(), offset()).prop_map(|(t, size)| Op::Truncate(t, size)),
        4 => (target(), falloc, offset(), length())
            .prop_map(|(t, how, at, len)| Op::Fallocate(t, how, at, len as u64)),
        3 => (target(), xattr.clone(), length(), setting).prop_map(|(t, n, len, how)| Op::Setxattr(t, n, len, how)),
        1 => (target(), xattr).prop_map(|(t, n)| Op::Removexattr(t, n)),
        2 => (target(), select(vec![4096, 12288, 12288, 5000])).prop_map(|(t, bytes)| Op::Fix(t, bytes)),
        2 => target().prop_map(Op::Unfix),
        1 => (target(), 0..0o10000u32).prop_map(|(t, mode)| Op::Chmod(t, mode)),
        1 => (target(), 0..4u32, 0..4u32).prop_map(|(t, u, g)| Op::Chown(t, u, g)),
        1 => (target(), 0..4_000_000_000i64).prop_map(|(t, at)| Op::Utimens(t, at)),
        1 => target().prop_map(Op::Fsync),
        1 => Just(Op::Sync),
        1 => Just(Op::Tick),
        1 => Just(Op::Reopen),
    ]
}

fn place() -> impl Strategy<Value = (Domain, DataMode)> {
    let domains = vec![Domain::Memory, Domain::CpuCache, Domain::PageCache];
    (select(domains), select(vec![DataMode::Cow, DataMode::InPlace]))
}

fn agree((domain, data): (Domain, DataMode), ops: &[Op], crash_at: usize) -> Result<(), String> {
    let began = Machine::begin();
    let options = MkfsOptions { data, ..MkfsOptions::default() };
    let empty = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES_MIN as usize], domain), &options).unwrap();
    let mut machine = Machine::new(empty.copy(), Model::new(began), 0)?;
    for (n, op) in ops.iter().enumerate() {
        if let Op::Open(slot, ..) | Op::Tmpfile(slot, _) = op
            && machine.model.opens().contains_key(slot)
        {
            machine.apply(&Op::Close(*slot))?.expect("it is open");
        }
        let say = |what: String| format!("step {n}, {op}: {what}");
        machine.apply(op).map_err(say)?.ok();
        machine.tree().map_err(say)?;
        if n == crash_at {
            // Everything was synced, or nothing needs to be: recovery shows what was there.
            if domain == Domain::PageCache {
                machine.fs().sync().map_err(|e| format!("{e:?}"))?;
            }
            let crashed = machine.fs().media().crash_point().media(Keep::Nothing);
            let mut model = machine.model.clone();
            model.close_all();
            machine = Machine::new(crashed, model, machine.step()).map_err(say)?;
            machine.tree().map_err(|what| format!("recovered after step {n}, {op}: {what}"))?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 5000, ..ProptestConfig::default() })]

    #[test]
    fn production_and_oracle_agree(
        place in place(),
        ops in prop::collection::vec(operation(), 1..=OPS),
        crash_at in 0..2 * OPS,
    ) {
        agree(place, &ops, crash_at).map_err(TestCaseError::fail)?;
    }
}
