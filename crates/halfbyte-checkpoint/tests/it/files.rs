//! What is replaced and what is not; folders that others work in or have left; who may change files.

use crate::support::{assert_names, listing, tensor, text_of, write_folder};
use half::f16;
use halfbyte::Float;
use halfbyte_checkpoint::folder::{check_target, look_at_target};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Error, Job, Replacement, Target, Weights, Written, files, write_dense};
use std::cell::RefCell;
use std::io::Write;
use std::path::{Path, PathBuf};

fn source(folder: &Path) -> Weights {
    std::fs::create_dir(folder).unwrap();
    write_folder(folder, &[tensor("norm.weight", DType::F16, &[2], &[f16::ONE; 2])], "{}");
    std::fs::write(folder.join("helpers.py"), "pass").unwrap();
    Weights::open(folder).unwrap()
}

fn write(source: &Weights, target: &Path, overwrite: bool) -> halfbyte_checkpoint::Result<Written> {
    write_dense(Job { overwrite, ..Job::new(source, target) }, Float::F32)
}

#[test]
fn overwriting_removes_nothing_but_files_of_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(&dir.path().join("in"));
    let target = dir.path().join("out");
    write(&source, &target, false).unwrap();
    // Its own code is there again.
    write(&source, &target, true).unwrap();
    let before = listing(&target);
    let refused = |name: &str| {
        let text = text_of(write(&source, &target, true));
        assert_names(&text, &["not overwritten", &format!("`{name}`")]);
        assert_eq!(listing(dir.path()), ["in", "out"], "{name}");
    };
    for name in ["notes.txt", "README.md", "train.py", ".gitignore", "logits.safetensors", "model-a-of-b.safetensors"] {
        std::fs::write(target.join(name), "mine").unwrap();
        refused(name);
        assert_eq!(std::fs::read(target.join(name)).unwrap(), b"mine");
        std::fs::remove_file(target.join(name)).unwrap();
    }
    for name in [".git", "checkpoints"] {
        std::fs::create_dir(target.join(name)).unwrap();
        refused(name);
        std::fs::remove_dir(target.join(name)).unwrap();
    }
    std::fs::write(target.join("helpers.py"), "pass # mine").unwrap();
    refused("helpers.py");
    std::fs::write(target.join("helpers.py"), "pass").unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("config.json", target.join("vocab.json")).unwrap();
        refused("vocab.json");
        std::fs::remove_file(target.join("vocab.json")).unwrap();
    }
    for name in ["model-00001-of-00002.safetensors", "pytorch_model.bin", "tokenizer.model", "model.gguf"] {
        std::fs::write(target.join(name), "older").unwrap();
    }
    write(&source, &target, true).unwrap();
    assert_eq!(listing(&target), before);
}

#[cfg(unix)]
#[test]
fn what_cannot_be_copied_beside_the_weights_is_refused_before_any_work() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let source = source(&dir.path().join("source"));
    let beside = |name: &str| source.folder().join(name);
    let refuses = |name: &str, parts: &[&str]| {
        let target = dir.path().join("target");
        for refused in [write(&source, &target, false).map(drop), check_target(&source, &target, Target::Native, false)]
        {
            assert_names(&text_of(refused), parts);
        }
        assert_eq!(listing(dir.path()), ["source"], "{name}");
    };
    for name in ["tokenizer.json", "LICENSE", "additional_chat_templates"] {
        symlink("/nowhere/blob", beside(name)).unwrap();
        refuses(name, &[name, "No such file"]);
        std::fs::remove_file(beside(name)).unwrap();
    }
    assert!(std::process::Command::new("mkfifo").arg(beside("tokenizer.json")).status().unwrap().success());
    refuses("tokenizer.json", &["tokenizer.json", "expected a regular file, got a pipe"]);
    std::fs::remove_file(beside("tokenizer.json")).unwrap();
    // A link to a file is as good as the file.
    std::fs::write(beside("blob"), "{}").unwrap();
    symlink("blob", beside("tokenizer.json")).unwrap();
    let written = write(&source, &dir.path().join("target"), false).unwrap();
    assert_eq!(std::fs::read(written.path.join("tokenizer.json")).unwrap(), b"{}");
}

#[test]
#[cfg(unix)]
fn a_link_to_a_file_of_the_source_is_no_target() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(&dir.path().join("in"));
    let before = listing(&dir.path().join("in"));
    for name in &before {
        let link = dir.path().join("out.gguf");
        std::os::unix::fs::symlink(dir.path().join("in").join(name), &link).unwrap();
        let text = text_of(check_target(&source, &link, Target::Gguf, true));
        assert_names(&text, &["other than the source", "out.gguf"]);
        std::fs::remove_file(link).unwrap();
    }
    // A place that can be written is left as it was.
    check_target(&source, &dir.path().join("a/b.gguf"), Target::Gguf, false).unwrap();
    check_target(&source, &dir.path().join("a/b"), Target::Awq, false).unwrap();
    assert_eq!(listing(dir.path()), ["in"]);
}

#[test]
fn what_comes_to_the_target_meanwhile_stays() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(&dir.path().join("in"));
    let target = dir.path().join("out");
    let late = |name: &str| {
        let at_the_end = |at: halfbyte_checkpoint::Progress<'_>| {
            if at.bytes == at.total_bytes {
                std::fs::create_dir_all(&target).unwrap();
                std::fs::write(target.join(name), "mine").unwrap();
            }
        };
        let overwrite = target.exists();
        let job = Job { overwrite, progress: Some(&mut { at_the_end }), ..Job::new(&source, &target) };
        let error = write_dense(job, Float::F32).unwrap_err();
        assert!(matches!(error, Error::Exists { .. }), "{error}");
        assert_eq!(std::fs::read(target.join(name)).unwrap(), b"mine");
        assert_eq!(listing(dir.path()), ["in", "out"]);
    };
    late("config.json");
    assert_eq!(listing(&target), ["config.json"]);
    write(&source, &target, true).unwrap();
    late("notes.txt");
    assert!(text_of(write(&source, &target, true)).contains("`notes.txt`"));
}

#[test]
fn the_folder_of_a_process_that_runs_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(&dir.path().join("in"));
    let target = dir.path().join("out");
    let seen = RefCell::new(Vec::new());
    let mut second = |_: halfbyte_checkpoint::Progress<'_>| {
        let before = listing(&dir.path().join(".out.tmp/new"));
        let refused = write(&source, &target, true);
        assert_eq!(listing(&dir.path().join(".out.tmp/new")), before);
        seen.borrow_mut().push(refused);
    };
    write_dense(Job { progress: Some(&mut second), ..Job::new(&source, &target) }, Float::F32).unwrap();
    let seen = seen.into_inner();
    assert!(!seen.is_empty() && seen.iter().all(|second| matches!(second, Err(Error::Locked { .. }))), "{seen:?}");
    assert_eq!(listing(dir.path()), ["in", "out"]);
}

#[test]
fn a_folder_that_is_not_ours_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(&dir.path().join("in"));
    let (target, temporary) = (dir.path().join("out"), dir.path().join(".out.tmp"));
    let refused = |files: &[&str]| {
        let text = text_of(write(&source, &target, true));
        assert_names(&text, &[".out.tmp", "not made it"]);
        assert_eq!(listing(&temporary), files);
        assert_eq!(listing(dir.path()), [".out.tmp", "in"]);
    };
    std::fs::create_dir_all(temporary.join("new")).unwrap();
    std::fs::write(temporary.join("new/config.json"), "mine").unwrap();
    refused(&["new"]);
    std::fs::write(temporary.join("lock"), "of another program").unwrap();
    refused(&["lock", "new"]);
    std::fs::remove_dir_all(&temporary).unwrap();
    std::fs::write(&temporary, "mine").unwrap();
    assert_names(&text_of(write(&source, &target, true)), &[".out.tmp", "not made it"]);
    assert_eq!(std::fs::read(&temporary).unwrap(), b"mine");
    std::fs::remove_file(&temporary).unwrap();
    // An empty one may be what a process that was killed at once has left.
    std::fs::create_dir(&temporary).unwrap();
    write(&source, &target, true).unwrap();
    assert_eq!(listing(dir.path()), ["in", "out"]);
}

#[test]
fn a_file_takes_its_place_when_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let put = |overwrite, inputs: &[PathBuf], content: &[u8]| {
        let mut file = Replacement::create(&path, overwrite, inputs)?;
        file.write_all(content).unwrap();
        assert_eq!(path.exists(), overwrite, "not before it is whole");
        file.commit()
    };
    put(false, &[], b"one").unwrap();
    assert!(matches!(put(false, &[], b"two"), Err(Error::Exists { .. })));
    put(true, &[], b"two").unwrap();
    drop(Replacement::create(&path, true, &[]).unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), b"two");
    // No name of an input will do.
    let input = dir.path().join("input");
    std::fs::hard_link(&path, &input).unwrap();
    for inputs in [[path.clone()], [input.clone()], [dir.path().join("../").join(dir.path()).join("file")]] {
        assert_names(&text_of(put(true, &inputs, b"three")), &["no input", "file"]);
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"two");
    assert_names(&text_of(Replacement::create(dir.path(), true, &[])), &["is a folder"]);
    #[cfg(unix)]
    {
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("file", &link).unwrap();
        let mut file = Replacement::create(&link, true, &[]).unwrap();
        file.write_all(b"four").unwrap();
        file.commit().unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read(&path).unwrap(), b"four");
        // What a link leads to is written; where that is nothing, the link stays.
        let dangling = dir.path().join("dangling");
        std::os::unix::fs::symlink("none", &dangling).unwrap();
        for overwrite in [false, true] {
            let refused = Replacement::create(&dangling, overwrite, &[]);
            assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
        }
        std::fs::remove_file(&dangling).unwrap();
        let mut nowhere = Replacement::create(Path::new("/dev/null"), false, &[]).unwrap();
        nowhere.write_all(b"five").unwrap();
        nowhere.commit().unwrap();
        assert_eq!(listing(dir.path()), ["file", "input", "link"]);
    }
}

#[test]
fn locks_are_seen_by_others_and_end_with_their_holder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    let first = files::lock(&path).unwrap();
    assert!(matches!(first, files::Lock::Held(_)));
    assert!(matches!(files::lock(&path).unwrap(), files::Lock::Busy));
    drop(first);
    assert!(matches!(files::lock(&path).unwrap(), files::Lock::Held(_)));
}

/// What changes the file system, in Rust's words.
const CHANGES: &[&str] = &[
    "fs::write(",
    "fs::copy(",
    "fs::rename(",
    "fs::create_dir",
    "fs::remove_",
    "fs::hard_link(",
    "fs::set_permissions(",
    "fs::symlink(",
    "File::create",
    "File::options(",
    "OpenOptions",
    "sync_all(",
    "sync_data(",
    ".persist(",
    "tempfile",
];

/// What may, besides tests: the file layer; benchmarks, in temporary folders of their own.
const MAY_CHANGE: &[&str] = &["halfbyte-checkpoint/src/files.rs", "halfbyte-cli/src/commands/bench/load.rs"];

#[test]
fn files_are_changed_in_one_place() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders: Vec<PathBuf> =
        ["checkpoint", "llm", "cli"].iter().map(|name| crates.join(format!("halfbyte-{name}/src"))).collect();
    let mut sources = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let place = path.strip_prefix(crates).unwrap().to_str().unwrap().replace('\\', "/");
            if path.is_dir() {
                folders.push(path);
            } else if place.ends_with(".rs") && !place.ends_with("/tests.rs") && !MAY_CHANGE.contains(&place.as_str()) {
                sources += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.split("\nmod tests {").next().unwrap();
                for (number, line) in code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
                {
                    let line = line.replace("OutputFile::", "");
                    let found = CHANGES.iter().find(|change| line.contains(**change));
                    assert_eq!(found, None, "{place}:{}: use halfbyte_checkpoint::files: {line}", number + 1);
                }
            }
        }
    }
    assert!(sources > 100, "found only {sources} sources");
}

#[test]
#[cfg(target_os = "linux")]
fn a_mount_point_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let (source, mount) = (source(&dir.path().join("in")), std::path::Path::new("/proc"));
    for refused in [
        write(&source, mount, true).map(drop),
        check_target(&source, mount, Target::Native, true),
        look_at_target(&source, mount, Target::Native, false),
    ] {
        assert_names(&text_of(refused), &["/proc", "a mount point"]);
    }
    // A look leaves what is there, and makes nothing.
    let target = dir.path().join("above/out");
    look_at_target(&source, &target, Target::Native, false).unwrap();
    assert_eq!(listing(dir.path()), ["in"]);
    let refused = text_of(look_at_target(&source, source.folder(), Target::Native, true));
    assert_names(&refused, &["other than the source"]);
}
