use super::*;
use crate::arch::spec::Shape;
use halfbyte::{Float, Group};
use halfbyte_checkpoint::files::faults::{self, Fault, Plan};

#[test]
fn codes_come_back_from_their_bytes() {
    for bits in [2, 3, 4, 8] {
        let format =
            WeightFormat { bits, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
        for k in [1, 7, 8, 33] {
            let codes: Vec<u8> = (0..3 * k).map(|i| (i * 37 % (1 << bits)) as u8).collect();
            let bytes = pack(&codes, k, format);
            assert_eq!(bytes.len(), 3 * row_bytes(k, format));
            assert_eq!(unpack(&bytes, k, format), codes, "{bits} bits, k {k}");
        }
    }
    let format =
        WeightFormat { bits: 4, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    assert_eq!(pack(&[1, 2, 3], 3, format), [0x21, 0x03]);
}

const FORMAT: WeightFormat =
    WeightFormat { bits: 3, group: Group::Size(32), zero: Zero::Integer, scale: Float::F32, channel_scale: None };
const BLOCKS: usize = 2;

fn groups(i: usize) -> Vec<LinearGroup> {
    let shape = Shape { n: 2, k: 32, bias: false };
    vec![LinearGroup {
        layers: vec![(format!("{i}.up"), shape)],
        step: 0,
        stage: 0,
        routed: false,
        adds: false,
        fold: None,
    }]
}

fn block(i: usize) -> Block {
    let codes = (0..64).map(|j| ((i + j * 5) % 8) as u8).collect();
    let zeros = Zeros::Integer(vec![3, 4]);
    let q = QTensor::new(FORMAT, [2, 32], codes, vec![0.5, 0.25 + i as f32], zeros, None).unwrap();
    let report = LayerReport {
        name: format!("{i}.up"),
        shape: [2, 32],
        output_error: 0.125,
        weight_error: 0.25,
        bits_per_weight: 3.5,
        activations: None,
        damping: None,
        dead_columns: 0,
    };
    Block {
        tensors: vec![(format!("{i}.up"), q)],
        changed: vec![("norm".to_owned(), vec![1.5; 3])],
        report: vec![report],
    }
}

fn manifest() -> Map<String, Value> {
    Map::from_iter([("window".to_owned(), 512.into())])
}

fn open(target: &Path) -> Result<WorkFolder> {
    WorkFolder::open(target, manifest(), false)
}

/// Computes the blocks that are missing, as calibration does, and looks at all of them.
fn compute(target: &Path) -> Result<WorkFolder> {
    let work = open(target)?;
    (0..BLOCKS).filter(|&i| !work.has(i)).try_for_each(|i| work.save(i, &block(i)))?;
    for i in 0..BLOCKS {
        let (found, wanted) = (work.load(i, &groups(i), FORMAT)?, block(i));
        assert!((&found.tensors, &found.changed) == (&wanted.tensors, &wanted.changed), "block {i}");
        assert_eq!(found.report, wanted.report);
        assert_eq!(work.tensor(i, &format!("{i}.up"), [2, 32], FORMAT)?, wanted.tensors[0].1);
    }
    Ok(work)
}

#[test]
fn a_flipped_bit_in_any_file_is_found() {
    let here = tempfile::tempdir().unwrap();
    let target = here.path().join("out");
    drop(compute(&target).unwrap());
    let folder = WorkFolder::path_of(&target).unwrap();
    let names = [WEIGHTS, REPORT, SUMS].map(|name| (0..BLOCKS).map(move |i| format!("block-{i:05}/{name}")));
    let mut flipped = 0;
    for name in names.into_iter().flatten().chain([MANIFEST.to_owned()]) {
        let path = folder.join(&name);
        let whole = std::fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(5).chain([whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(&path, damaged).unwrap();
            let found = compute(&target);
            // White space may be other white space.
            let same = name == MANIFEST && whole[at].is_ascii_whitespace() && found.is_ok();
            assert!(same || matches!(found, Err(Error::Unfinished { .. })), "{name}, byte {at}: {found:?}");
            flipped += 1;
        }
        std::fs::write(&path, whole).unwrap();
    }
    println!("{flipped} bits flipped");
    assert!(flipped > 100);
    // A block that is removed is computed again.
    std::fs::write(folder.join("block-00001").join(REPORT), "[]").unwrap();
    let text = compute(&target).unwrap_err().to_string();
    assert!(text.contains("block 1 is damaged") && text.contains("to have it computed again"), "{text}");
    std::fs::remove_dir_all(folder.join("block-00001")).unwrap();
    compute(&target).unwrap().remove().unwrap();
    assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 0);
}

#[test]
fn a_kill_or_a_refusal_at_any_operation_leaves_work_that_is_gone_on_with() {
    let plan = |fault| Plan { fault, exchange: true };
    let whole = |target: &Path| compute(target).and_then(WorkFolder::remove);
    let fresh = || tempfile::tempdir().unwrap();
    let here = fresh();
    let (done, operations) = faults::with(plan(None), || whole(&here.path().join("out")));
    done.unwrap();
    let mut places = 0;
    for fault in [Fault::Killed, Fault::KilledHalfway, Fault::Short, Fault::Refused(28), Fault::Refused(4)] {
        for at in 0..operations {
            let here = fresh();
            let target = here.path().join("out");
            let (first, _) = faults::with(plan(Some((at, fault))), || whole(&target));
            let harmless = matches!(fault, Fault::Short | Fault::Refused(4));
            assert!(first.is_ok() == harmless || at + 1 == operations, "{fault:?} at {at} of {operations}: {first:?}");
            let again = if first.is_ok() { Ok(()) } else { faults::with(plan(None), || whole(&target)).0 };
            again.unwrap_or_else(|e| panic!("{fault:?} at {at} of {operations}, again: {e}"));
            assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 0, "{fault:?} at {at} of {operations}");
            places += 1;
        }
    }
    println!("{places} places of {operations} operations");
}
