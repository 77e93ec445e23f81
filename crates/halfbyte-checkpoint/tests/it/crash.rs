//! Kills and refusals at every operation on files: the target is the old one or the new one, and nothing is left over.

use crate::support::{Tensor, tensor, testdata, write_folder};
use half::f16;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Group, WeightFormat, Zero};
use halfbyte_checkpoint::files::faults::{self, Fault, Plan};
use halfbyte_checkpoint::folder::RankFolders;
use halfbyte_checkpoint::safetensors::{DType, TensorSpec, create};
use halfbyte_checkpoint::{
    Conversion, Error, Job, LinearWeight, Part, Quantization, Replacement, Result, Target, Weights, convert,
    write_dense, write_model, write_part,
};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

const FORMAT: WeightFormat =
    WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };

/// Error numbers of Linux: no space, input or output, access, file too large.
const REFUSALS: [i32; 4] = [28, 5, 13, 27];
const INTERRUPTED: i32 = 4;

/// Everything below a folder by its path: the bytes of files, None for folders.
type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

fn tree(folder: &Path) -> Tree {
    let mut found = Tree::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder_here) = folders.pop() {
        for entry in std::fs::read_dir(&folder_here).unwrap() {
            let path = entry.unwrap().path();
            let content = if path.is_dir() { None } else { Some(std::fs::read(&path).unwrap()) };
            found.insert(path.strip_prefix(folder).unwrap().to_owned(), content);
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    found
}

/// What of a tree lies below a path, and the path itself.
fn below(tree: &Tree, path: &Path) -> Tree {
    let part = tree.iter().filter_map(|(at, content)| Some((at.strip_prefix(path).ok()?.to_owned(), content.clone())));
    part.collect()
}

/// A folder in memory where there is such: thousands of models are written.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn write_tree(tree: &Tree, to: &Path) {
    for (path, content) in tree {
        match content {
            None => std::fs::create_dir_all(to.join(path)).unwrap(),
            Some(bytes) => std::fs::write(to.join(path), bytes).unwrap(),
        }
    }
}

/// What writes a target.
type Verb<'a> = &'a (dyn Fn(&Path, bool) -> Result<()> + Sync);

/// A verb with the place that it writes to.
struct Case<'a> {
    name: &'a str,
    verb: Verb<'a>,
    /// What lies in the folder before.
    before: Tree,
    /// The target in it.
    target: &'a str,
    overwrite: bool,
    exchange: bool,
}

impl Case<'_> {
    /// The folder as it is before.
    fn folder(&self) -> tempfile::TempDir {
        let folder = scratch();
        write_tree(&self.before, folder.path());
        folder
    }

    /// Runs the verb with a fault; gives the result and the number of operations.
    fn run(&self, folder: &Path, fault: Option<(usize, Fault)>, overwrite: bool) -> (Result<()>, usize) {
        let plan = Plan { fault, exchange: self.exchange };
        faults::with(plan, || (self.verb)(&folder.join(self.target), overwrite))
    }

    /// Stops it at every operation; gives the number of kills and of refusals.
    fn check(&self) -> (usize, usize) {
        let target = Path::new(self.target);
        let whole = self.folder();
        let (done, operations) = self.run(whole.path(), None, self.overwrite);
        done.unwrap();
        let after = tree(whole.path());
        let (old, new) = (below(&self.before, target), below(&after, target));
        let hidden = |tree: &Tree| tree.keys().any(|path| path.to_str().unwrap().contains(".tmp"));
        assert!(old != new && !hidden(&after), "{}", self.name);

        let (mut kills, mut refusals) = (0, 0);
        let mut first_new = operations;
        for at in 0..operations {
            for fault in [Fault::Killed, Fault::KilledHalfway] {
                let place = format!("{}: {fault:?} at {at} of {operations}", self.name);
                let folder = self.folder();
                let folder = folder.path();
                let (done, _) = self.run(folder, Some((at, fault)), self.overwrite);
                // After the last operation nothing is left to be refused.
                assert!(done.is_err() || fault == Fault::KilledHalfway && at + 1 == operations, "{place}");
                let found = tree(folder);
                let is_new = below(&found, target) == new;
                if is_new {
                    first_new = first_new.min(at);
                } else if below(&found, target) != old {
                    // Between two renames: the old one is whole in its other place, and comes back.
                    assert!(!self.exchange && below(&found, target).is_empty(), "{place}");
                    assert_eq!(below(&found, &moved(target)), old, "{place}");
                    let refused = self.run(folder, None, false).0.expect_err(&place);
                    assert!(matches!(refused, Error::Exists { .. }), "{place}: {refused}");
                    assert_eq!(tree(folder), self.before, "{place}");
                }
                let (again, _) = self.run(folder, None, self.overwrite || is_new);
                again.unwrap_or_else(|e| panic!("{place}, again: {e}"));
                assert_eq!(tree(folder), after, "{place}, again");
                kills += 1;
            }
        }
        let faults = REFUSALS.map(Fault::Refused).into_iter().chain([Fault::Refused(INTERRUPTED), Fault::Short]);
        for (at, fault) in faults.flat_map(|fault| (0..operations).map(move |at| (at, fault))) {
            let place = format!("{}: {fault:?} at {at} of {operations}", self.name);
            let folder = self.folder();
            let (done, _) = self.run(folder.path(), Some((at, fault)), self.overwrite);
            let found = tree(folder.path());
            match done {
                Ok(()) => assert_eq!(found, after, "{place}"),
                Err(error) => {
                    assert!(matches!(fault, Fault::Refused(number) if number != INTERRUPTED), "{place}: {error}");
                    assert!(matches!(error, Error::Io { .. }), "{place}: {error}");
                    // The last steps are a sync and the removal of what was there.
                    assert!(
                        found == self.before || found == after && at + 1 >= first_new,
                        "{place}: {error}: {found:?}"
                    );
                }
            }
            refusals += 1;
        }
        (kills, refusals)
    }
}

/// Where the target lies between two renames.
fn moved(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap().to_str().unwrap();
    target.with_file_name(format!(".{name}.tmp/old"))
}

/// A small dense model with two blocks and files beside it.
fn dense(folder: &Path) -> Weights {
    let mut tensors: Vec<Tensor> = Vec::new();
    for (i, name) in ["model.layers.0.q_proj", "model.layers.1.up_proj"].iter().enumerate() {
        let weights: Vec<f16> = (0..32 * 64).map(|j| f16::from_f32(((j * 7 + i) % 13) as f32 / 8.0 - 0.75)).collect();
        tensors.push(tensor(&format!("{name}.weight"), DType::F16, &[32, 64], &weights));
    }
    tensors.push(tensor("model.norm.weight", DType::F16, &[64], &[f16::ONE; 64]));
    write_folder(folder, &tensors, r#"{"model_type": "llama"}"#);
    std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    std::fs::write(folder.join("modeling_own.py"), "pass").unwrap();
    std::fs::create_dir(folder.join("additional_chat_templates")).unwrap();
    std::fs::write(folder.join("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    Weights::open(folder).unwrap()
}

fn quantize(source: &Weights, target: &Path, overwrite: bool) -> Result<()> {
    let quantization = Quantization {
        target: Target::Gptq(None),
        format: &mut |module| module.in_block().then_some(FORMAT),
        quantize: &mut |_, weight, format| match weight {
            LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
            LinearWeight::Quantized(q) => Ok(q.clone()),
        },
        dense: &mut |_| None,
        untied: None,
    };
    // Several files, and an index.
    let job = Job { overwrite, max_shard_bytes: 1000, ..Job::new(source, target) };
    write_model(job, quantization).map(drop)
}

fn change(source: &Weights, target: &Path, overwrite: bool, form: Target) -> Result<()> {
    let conversion = Conversion { target: form, bits: None, group: None, channel_scale: None, requantize: true };
    convert(Job { overwrite, ..Job::new(source, target) }, conversion).map(drop)
}

#[test]
fn at_every_operation_the_target_is_the_old_one_or_the_new_one() {
    let here = scratch();
    let path = |name: &str| here.path().join(name);
    std::fs::create_dir(path("dense")).unwrap();
    let source = dense(&path("dense"));
    quantize(&source, &path("quantized"), false).unwrap();
    let quantized = Weights::open(path("quantized")).unwrap();
    let llama = Weights::open(testdata("gguf/tiny_llama.gguf")).unwrap();

    let to_gptq: Verb<'_> = &|target, overwrite| quantize(&source, target, overwrite);
    let to_onnx: Verb<'_> = &|target, overwrite| change(&quantized, target, overwrite, Target::Onnx);
    let to_gguf: Verb<'_> = &|target, overwrite| change(&llama, target, overwrite, Target::Gguf);
    let to_dense: Verb<'_> =
        &|target, overwrite| write_dense(Job { overwrite, ..Job::new(&quantized, target) }, Float::F32).map(drop);

    let to_file: Verb<'_> = &|target, overwrite| {
        let mut file = Replacement::create(target, overwrite, &[])?;
        // It is in memory until the end.
        file.write_all(b"a newer file").unwrap();
        file.commit()
    };

    // An older model: what another verb writes, and files that the new one has not.
    let below_out = |tree: Tree| -> Tree {
        tree.into_iter().map(|(path, content)| (Path::new("out").join(path), content)).collect()
    };
    let folder = |content: &Tree| {
        let mut folder = below_out(content.clone());
        folder.insert("out".into(), None);
        folder
    };
    let mut older = tree(&path("dense"));
    older.insert("NOTICE".into(), Some(b"older".to_vec()));
    let older_file = Tree::from([("m.gguf".into(), Some(b"an older file".to_vec()))]);

    let mut cases = Vec::new();
    let mut check = |name, verb, before, target, overwrite, exchange| {
        cases.push(Case { name, verb, before, target, overwrite, exchange });
    };
    for (name, verb) in [("quantize", to_gptq), ("convert to ONNX", to_onnx), ("dequantize", to_dense)] {
        check(name, verb, folder(&older), "out", true, true);
        check(name, verb, folder(&older), "out", true, false);
        check(name, verb, Tree::new(), "out", false, true);
    }
    check("quantize into an empty folder", to_gptq, folder(&Tree::new()), "out", false, true);
    check("quantize into new folders", to_gptq, Tree::new(), "a/b/out", false, true);
    check("convert to a file", to_gguf, Tree::new(), "m.gguf", false, true);
    check("convert over a file", to_gguf, older_file.clone(), "m.gguf", true, true);
    check("write a file", to_file, Tree::new(), "m.gguf", false, true);
    check("write over a file", to_file, older_file, "m.gguf", true, true);
    // Code is replaced only by the same.
    older.remove(Path::new("modeling_own.py"));
    check("convert to a file in a folder", to_gguf, folder(&older), "out", true, true);
    // Each on a thread of its own, since faults are a thread's.
    let counts = std::thread::scope(|scope| {
        let threads: Vec<_> = cases.iter().map(|case| scope.spawn(|| case.check())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let (kills, refusals) = counts.iter().fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1));
    println!("{} cases, killed at {kills} places, refused at {refusals}", cases.len());
    assert!(kills > 1000 && refusals > 3000);
}

#[test]
fn files_of_tensors_alone_are_all_there_or_none() {
    let spec = |name: &str| TensorSpec { name: name.to_owned(), dtype: DType::U8, shape: vec![4] };
    // Two files, and an index that is written last.
    let write = |folder: &Path| {
        let mut writer = create(folder, &[spec("a"), spec("b")], 4)?;
        writer.write("a", &[1; 4])?;
        writer.write("b", &[2; 4])?;
        writer.finish()
    };
    let run = |fault| {
        let folder = scratch();
        let (done, operations) = faults::with(Plan { fault, exchange: true }, || write(folder.path()));
        (done, operations, tree(folder.path()).len())
    };
    let (done, operations, files) = run(None);
    assert_eq!((done.unwrap().files.len(), files), (3, 3));
    for (at, number) in (0..operations).flat_map(|at| REFUSALS.map(|number| (at, number))) {
        let (done, _, files) = run(Some((at, Fault::Refused(number))));
        assert!(matches!(done, Err(Error::Io { .. })), "{number} at {at} of {operations}: {done:?}");
        assert_eq!(files, 0, "{number} at {at} of {operations}");
    }
}

/// Writes the parts of so many ranks, of a model of this name.
fn cut(source: &Weights, model: &str, ranks: usize, target: &Path, overwrite: bool) -> Result<()> {
    let folders = RankFolders::create(source, target, ranks, overwrite)?;
    for rank in 0..ranks {
        let part = Part { rank, size: ranks, model: model.to_owned() };
        write_part(Job::new(source, &folders.place(rank)), &part, &|_| None)?;
    }
    folders.commit().map(drop)
}

#[test]
fn at_every_operation_the_parts_of_all_ranks_are_the_old_ones_or_the_new_ones() {
    let here = scratch();
    std::fs::create_dir(here.path().join("dense")).unwrap();
    let source = dense(&here.path().join("dense"));
    cut(&source, "an older one", 3, &here.path().join("older/out"), false).unwrap();
    let mut older = tree(&here.path().join("older"));
    older.insert("out/notes.txt".into(), Some(b"no part".to_vec()));
    let nothing = Tree::from([("out".into(), None)]);
    for (before, above) in [(older, false), (nothing, false), (Tree::new(), true)] {
        let run = |folder: &Path, fault, overwrite| {
            let target = folder.join(if above { "a/out" } else { "out" });
            faults::with(Plan { fault, exchange: true }, || cut(&source, "a newer one", 2, &target, overwrite))
        };
        let begin = || {
            let folder = scratch();
            write_tree(&before, folder.path());
            folder
        };
        let whole = begin();
        let (done, operations) = run(whole.path(), None, true);
        done.unwrap();
        let after = tree(whole.path());
        let names = after.keys().map(|path| path.to_str().unwrap());
        assert_eq!(names.filter(|name| name.contains(".tmp") || name.ends_with("rank-2")).count(), 0);

        let mut found = [0; 2];
        for (at, fault) in (0..operations).flat_map(|at| [(at, Fault::Killed), (at, Fault::KilledHalfway)]) {
            let place = format!("{fault:?} at {at} of {operations}");
            let [folder, again] = [begin(), begin()];
            for folder in [&folder, &again] {
                let _ = run(folder.path(), Some((at, fault)), true);
            }
            // A run that may replace nothing puts all in order: what is there is all old or all new.
            let tidied = run(folder.path(), None, false).0;
            let is = tree(folder.path());
            match tidied {
                Ok(()) => assert!(is == after && !before.contains_key(Path::new("out/rank-0")), "{place}"),
                Err(Error::Exists { .. }) => assert!(is == before || is == after, "{place}: {is:?}"),
                Err(error) => panic!("{place}: {error}"),
            }
            found[if is == before { 0 } else { 1 }] += 1;
            run(again.path(), None, true).0.unwrap_or_else(|e| panic!("{place}, again: {e}"));
            assert_eq!(tree(again.path()), after, "{place}, again");
        }
        assert!(found[1] > 10 && (found[0] > 100) == before.contains_key(Path::new("out/rank-0")), "{found:?}");
        for (at, number) in (0..operations).flat_map(|at| REFUSALS.map(|number| (at, number))) {
            let (place, folder) = (format!("{number} at {at} of {operations}"), begin());
            let done = run(folder.path(), Some((at, Fault::Refused(number))), true).0;
            assert!(matches!(done, Err(Error::Io { .. })), "{place}: {done:?}");
            let is = tree(folder.path());
            assert!(is == before || is == after && at > operations / 2, "{place}: {is:?}");
        }
    }
}

#[test]
fn folders_of_ranks_are_one_process_s_and_only_parts_are_replaced() {
    let here = scratch();
    let path = |name: &str| here.path().join(name);
    std::fs::create_dir(path("dense")).unwrap();
    let (source, out) = (dense(&path("dense")), path("out"));
    cut(&source, "a", 2, &out, false).unwrap();
    let before = tree(here.path());
    let held = RankFolders::create(&source, &out, 2, true).unwrap();
    let locked = tree(here.path());
    for overwrite in [true, false] {
        let refused = cut(&source, "b", 3, &out, overwrite).unwrap_err();
        assert!(matches!(refused, Error::Locked { .. }), "{refused}");
        assert_eq!(tree(here.path()), locked);
    }
    drop(held);
    assert_eq!(tree(here.path()), before);
    // What is there, under the name of a further rank, is no part, a link or a file.
    let refuses = |words: &str| {
        let before = tree(here.path());
        let refused = cut(&source, "b", 2, &out, true).unwrap_err().to_string();
        assert!(refused.contains("rank-5") && refused.contains(words), "{refused}");
        assert_eq!(tree(here.path()), before);
    };
    let other = out.join("rank-5");
    write_tree(&tree(&path("dense")), &other);
    refuses("no part of a model");
    std::fs::remove_dir_all(&other).unwrap();
    std::fs::write(&other, "a file").unwrap();
    refuses("not a folder");
    #[cfg(unix)]
    {
        std::fs::remove_file(&other).unwrap();
        std::os::unix::fs::symlink("rank-0", &other).unwrap();
        refuses("not a folder");
    }
    std::fs::remove_file(&other).unwrap();
    // An empty one, and one of an older model of more ranks, go.
    std::fs::create_dir(&other).unwrap();
    std::fs::rename(out.join("rank-1"), out.join("rank-7")).unwrap();
    cut(&source, "b", 2, &out, true).unwrap();
    let names: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}
