//! Compiled kernels are kept, found, checked and bounded, whoever else is at it.

use super::{child, in_child, is_child, nvrtc, passed};
use halfbyte::Error;
use halfbyte::cuda::cache::{Cache, Key};
use halfbyte::cuda::compile::Compiler;
use halfbyte::cuda::driver::Version;
use halfbyte::cuda::nvrtc::Compiled;
use halfbyte::cuda::sources::{Arch, Instance, Source};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

static SOURCE: Source = Source {
    path: "test/add.cu",
    text: "template <int V> __global__ void add(float* y) { y[threadIdx.x] += V; }",
    parameters: &[],
};

const COMPILER: Version = Version { major: 13, minor: 0 };
const DRIVER: Version = Version { major: 13, minor: 4 };

fn arch() -> Arch {
    "sm_90a".parse().unwrap()
}

fn instance(value: u32) -> Instance {
    Instance::new(&SOURCE, format!("add<{value}>"))
}

fn key(value: u32) -> Key {
    Key::of(&instance(value), arch()).unwrap()
}

/// Stands for a kernel: bytes that differ from number to number.
fn compiled(value: u32) -> Compiled {
    Compiled { name: format!("add{value}"), code: (0..5000u32).map(|i| (i * 7 + value) as u8).collect() }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn what_is_kept_is_found_by_its_key_only() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path().join("not/there/yet"));
    assert_eq!((cache.find(&key(1), COMPILER), cache.size()), (None, (0, 0)));
    cache.keep(&key(1), COMPILER, &compiled(1)).unwrap();
    assert_eq!(cache.find(&key(1), COMPILER), Some(compiled(1)));
    assert_eq!(cache.find(&key(2), COMPILER), None);
    let other_arch = Key::of(&instance(1), "sm_80".parse().unwrap()).unwrap();
    assert_eq!(cache.find(&other_arch, COMPILER), None);
    static OTHER: Source =
        Source { path: "test/add.cu", text: "template <int V> __global__ void add(float* y) {}", parameters: &[] };
    let other_source = Key::of(&Instance::new(&OTHER, "add<1>"), arch()).unwrap();
    assert_eq!(cache.find(&other_source, COMPILER), None);
    let (kernels, bytes) = cache.size();
    assert!(kernels == 1 && bytes > 5000);
    assert_eq!(files(cache.folder()).len(), 1, "no temporary file is left");
}

#[test]
fn the_newest_that_the_driver_takes_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    for (value, major, minor) in [(1, 12, 9), (2, 13, 0), (3, 13, 10), (4, 14, 0)] {
        cache.keep(&key(9), Version { major, minor }, &compiled(value)).unwrap();
    }
    assert_eq!(cache.find(&key(9), DRIVER), Some(compiled(3)));
    assert_eq!(cache.find(&key(9), Version { major: 12, minor: 2 }), Some(compiled(1)));
    assert_eq!(cache.find(&key(9), Version { major: 11, minor: 8 }), None);
    assert_eq!(cache.find(&key(8), DRIVER), None);
}

#[test]
fn a_damaged_file_is_removed_and_never_used() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    cache.keep(&key(1), COMPILER, &compiled(1)).unwrap();
    let path = files(folder.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let mut damaged: Vec<Vec<u8>> = [0, 1, 7, 8, 40, 43, 44, whole.len() - 1].map(|len| whole[..len].to_vec()).into();
    for at in [0, 8, 20, 40, 43, 44, 60, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        damaged.push(bytes);
    }
    damaged.push([whole.as_slice(), b"x"].concat());
    for bytes in damaged {
        fs::write(&path, &bytes).unwrap();
        assert_eq!(cache.find(&key(1), COMPILER), None, "{} bytes", bytes.len());
        assert!(!path.exists(), "{} bytes", bytes.len());
        cache.keep(&key(1), COMPILER, &compiled(1)).unwrap();
        assert_eq!(cache.find(&key(1), COMPILER), Some(compiled(1)));
    }
}

#[test]
fn those_used_longest_ago_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    cache.keep(&key(0), COMPILER, &compiled(0)).unwrap();
    let one = cache.size().1;
    let cache = cache.with_limit(3 * one + one / 2);
    let long_ago = SystemTime::now() - Duration::from_secs(10_000);
    for value in 1..3 {
        cache.keep(&key(value), COMPILER, &compiled(value)).unwrap();
    }
    for (age, path) in files(folder.path()).iter().enumerate() {
        fs::File::open(path).unwrap().set_modified(long_ago + Duration::from_secs(age as u64)).unwrap();
    }
    // What a killed process has left, and what is not ours.
    fs::write(folder.path().join(".writing-abandoned"), "half").unwrap();
    fs::File::open(folder.path().join(".writing-abandoned")).unwrap().set_modified(long_ago).unwrap();
    fs::write(folder.path().join(".writing-now"), "half").unwrap();
    fs::write(folder.path().join("letter.txt"), vec![0; 20_000]).unwrap();
    // Use makes young.
    for value in [0, 2] {
        assert!(cache.find(&key(value), COMPILER).is_some());
    }
    cache.keep(&key(3), COMPILER, &compiled(3)).unwrap();
    assert_eq!([0, 1, 2, 3].map(|value| cache.find(&key(value), COMPILER).is_some()), [true, false, true, true]);
    let exists = |name: &str| folder.path().join(name).exists();
    assert_eq!([".writing-abandoned", ".writing-now", "letter.txt"].map(exists), [false, true, true]);
    // One that is alone above the limit is kept all the same.
    let cache = cache.with_limit(10);
    cache.keep(&key(4), COMPILER, &compiled(4)).unwrap();
    assert_eq!([0, 2, 3, 4].map(|value| cache.find(&key(value), COMPILER).is_some()), [false, false, false, true]);
}

#[test]
fn processes_and_threads_share_a_folder() {
    const TEST: &str = "cuda::cache::processes_and_threads_share_a_folder";
    const VARIABLE: &str = "HALFBYTE_TEST_FOLDER";
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        let environment = [(VARIABLE, folder.path().to_str().unwrap())];
        let started: Vec<_> = (0..3)
            .map(|_| {
                let mut command = child(TEST, &environment);
                command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for process in started {
            passed(TEST, process.wait_with_output().unwrap());
        }
        let cache = Cache::at(folder.path());
        assert_eq!(cache.find(&key(1), COMPILER), Some(compiled(1)));
        assert_eq!(files(folder.path()).len(), 2, "one file a kernel and no temporary ones");
        return;
    }
    let cache = Cache::at(std::env::var(VARIABLE).unwrap());
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let cache = &cache;
            scope.spawn(move || {
                for turn in 0..10 {
                    let value = (thread + turn) % 2 + 1;
                    cache.keep(&key(value), COMPILER, &compiled(value)).unwrap();
                    // Never half a file, whoever replaces it at this moment.
                    assert_eq!(cache.find(&key(value), COMPILER), Some(compiled(value)));
                }
            });
        }
    });
}

#[test]
fn variables_say_where_the_folder_is() {
    const TEST: &str = "cuda::cache::variables_say_where_the_folder_is";
    const EXPECTED: &str = "HALFBYTE_TEST_EXPECTED";
    if is_child() {
        match std::env::var(EXPECTED).unwrap().as_str() {
            "none" => {
                assert!(Cache::of_user().unwrap_err().to_string().contains("HALFBYTE_CACHE, XDG_CACHE_HOME and HOME"))
            }
            folder => assert_eq!(Cache::of_user().unwrap().folder(), Path::new(folder)),
        }
        return;
    }
    for (cache, xdg, home, expected) in [
        ("/a", "/b", "/c", "/a"),
        ("", "/b", "/c", "/b/halfbyte/cubin"),
        ("", "", "/c", "/c/.cache/halfbyte/cubin"),
        ("", "", "", "none"),
    ] {
        in_child(TEST, &[("HALFBYTE_CACHE", cache), ("XDG_CACHE_HOME", xdg), ("HOME", home), (EXPECTED, expected)]);
    }
}

#[test]
fn compiled_once_then_out_of_the_cache_and_again_if_damaged() {
    let Some(nvrtc) = nvrtc() else { return };
    let driver = nvrtc.version();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let compiler = Compiler::with_cache(arch(), driver, Some(cache.clone()));
    let first = compiler.get(&instance(1)).unwrap();
    assert!(first.code.starts_with(b"\x7fELF") && first.name.contains("add"));
    assert_eq!(cache.find(&key(1), nvrtc.version()).as_ref(), Some(&first));
    // Another content under the same key shows where the second answer comes from.
    cache.keep(&key(1), nvrtc.version(), &compiled(1)).unwrap();
    assert_eq!(compiler.get(&instance(1)).unwrap(), compiled(1));
    let path = files(folder.path()).remove(0);
    fs::write(&path, "damaged").unwrap();
    assert_eq!(compiler.get(&instance(1)).unwrap(), first);
    assert_eq!(cache.find(&key(1), nvrtc.version()).as_ref(), Some(&first));
    assert_eq!(compiler.refusal(), None);
}

#[test]
fn a_folder_that_cannot_be_written_is_said_and_harms_nothing() {
    let Some(nvrtc) = nvrtc() else { return };
    let cache = Cache::at("/proc/halfbyte");
    assert!(cache.probe().is_err());
    let compiler = Compiler::with_cache(arch(), nvrtc.version(), Some(cache));
    assert_eq!(compiler.refusal(), None);
    for _ in 0..2 {
        assert!(compiler.get(&instance(1)).unwrap().code.starts_with(b"\x7fELF"));
    }
    assert!(compiler.refusal().unwrap().starts_with("/proc/halfbyte: "));
}

#[test]
fn a_folder_that_may_only_be_read_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    cache.keep(&key(1), COMPILER, &compiled(1)).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    assert_eq!(cache.find(&key(1), COMPILER), Some(compiled(1)));
    // The superuser may write everywhere.
    let kept = cache.keep(&key(2), COMPILER, &compiled(2));
    assert_eq!(kept.is_ok(), cache.probe().is_ok());
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn kernels_made_elsewhere_serve_a_machine_without_a_compiler() {
    const TEST: &str = "cuda::cache::kernels_made_elsewhere_serve_a_machine_without_a_compiler";
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        Cache::at(folder.path()).keep(&key(1), COMPILER, &compiled(1)).unwrap();
        let folder = folder.path().to_str().unwrap();
        return in_child(TEST, &[("HALFBYTE_NVRTC", "/nonexistent"), ("HALFBYTE_CACHE", folder)]);
    }
    let compiler = Compiler::new(arch(), DRIVER);
    assert_eq!(compiler.get(&instance(1)).unwrap(), compiled(1));
    match compiler.get(&instance(2)).unwrap_err() {
        Error::LibraryMissing { library: "NVRTC", looked } => assert!(looked[0].contains("/nonexistent"), "{looked:?}"),
        other => panic!("{other}"),
    }
}

#[test]
fn code_of_a_newer_compiler_is_not_made_for_an_older_driver() {
    let Some(nvrtc) = nvrtc() else { return };
    let older = Version { major: nvrtc.version().major - 1, minor: 9 };
    let error = Compiler::with_cache(arch(), older, None).get(&instance(1)).unwrap_err();
    assert!(matches!(error, Error::DriverTooOld { .. }), "{error}");
}

#[test]
fn sources_are_read_from_a_folder_if_asked_for() {
    const TEST: &str = "cuda::cache::sources_are_read_from_a_folder_if_asked_for";
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("test")).unwrap();
        fs::create_dir_all(folder.path().join("include")).unwrap();
        fs::write(folder.path().join("test/add.cu"), "edited").unwrap();
        for header in halfbyte::cuda::sources::HEADERS {
            fs::write(folder.path().join(header.path), header.text).unwrap();
        }
        return in_child(TEST, &[("HALFBYTE_CUDA_SOURCES", folder.path().to_str().unwrap())]);
    }
    assert_eq!(SOURCE.read().unwrap(), "edited");
    static MISSING: Source = Source { path: "test/none.cu", text: "", parameters: &[] };
    let error = Key::of(&Instance::new(&MISSING, String::new()), arch()).unwrap_err().to_string();
    assert!(error.starts_with("HALFBYTE_CUDA_SOURCES: ") && error.contains("test/none.cu"), "{error}");
    // The key is that of the edited text.
    static EDITED: Source = Source { path: "test/add.cu", text: "edited", parameters: &[] };
    assert_eq!(key(1), Key::of(&Instance::new(&EDITED, "add<1>"), arch()).unwrap());
}
