//! Who may import whom, and where unsafe code may stand.

use std::path::{Path, PathBuf};

/// Modules of the library in pipeline order, with those that each may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("tensor", &[]),
    ("random", &[]),
    ("error", &["kernel"]),
    ("checks", &["error", "kernel"]),
    ("memory", &["error"]),
    ("conv", &["error", "format", "memory"]),
    ("format", &["conv", "error", "memory", "quantize", "tensor"]),
    ("kernel", &["error", "format", "tensor"]),
    ("kv_pages", &["error"]),
    ("quantize", &["conv", "error", "format", "memory", "tensor"]),
    ("layout", &["error", "format", "memory", "tensor"]),
    ("cpu", &["checks", "conv", "error", "format", "kernel", "kv_pages", "layout", "memory", "quantize", "tensor"]),
    ("cuda", &["checks", "conv", "error", "format", "kernel", "kv_pages", "layout", "tensor"]),
    ("ops", &["conv", "cpu", "cuda", "error", "format", "kernel", "layout", "memory", "tensor"]),
];

/// Where `unsafe` may be written: vector code, the team of threads, and outputs that tasks share; libraries opened at run
/// time, and the GPU driver.
const MAY_BE_UNSAFE: &[&str] =
    &["cpu/", "cuda/cublaslt.rs", "cuda/driver.rs", "cuda/driver/", "cuda/library.rs", "cuda/nccl.rs", "cuda/nvrtc.rs"];

/// Where it may be written once a file: the launch of a kernel.
const LAUNCHERS: &[&str] = &["cuda/conv/", "cuda/int8/", "cuda/matmul/", "cuda/nn/", "cuda/roofline.rs"];

/// Lines that a file may have: what is longer is about more than one thing.
const MOST_LINES: [(&str, usize); 3] = [("rs", 500), ("cu", 450), ("cuh", 450)];

/// Files below a folder whose names end so, but what a compiler has left.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: PathBuf| match path.is_dir() {
        true if path.ends_with("target") => Vec::new(),
        true => files(&path, extensions),
        false if path.extension().is_some_and(|e| extensions.iter().any(|other| e == *other)) => vec![path],
        false => Vec::new(),
    };
    entries.flat_map(of).collect()
}

fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let paths = files(&root, &["rs"]);
    assert!(paths.len() > 20, "found only {} sources", paths.len());
    paths
        .into_iter()
        .map(|p| (p.strip_prefix(&root).unwrap().to_owned(), std::fs::read_to_string(&p).unwrap()))
        .collect()
}

#[test]
fn modules_import_only_what_they_may() {
    for (path, text) in sources() {
        let module = path.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if module == "lib" {
            continue;
        }
        let allowed = MAY_IMPORT.iter().find(|(name, _)| *name == module);
        let (_, allowed) = allowed.unwrap_or_else(|| panic!("{}: module {module} has no rule here", path.display()));
        for (number, line) in text.lines().enumerate() {
            for (at, _) in line.match_indices("crate::").filter(|(at, _)| !line[..*at].ends_with('$')) {
                let imported: String =
                    line[at + 7..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let inside = imported == module || allowed.contains(&imported.as_str());
                assert!(inside || line.trim_start().starts_with("//"), "{}:{}: {line}", path.display(), number + 1);
            }
        }
    }
}

#[test]
fn unsafe_code_stands_only_where_it_may() {
    for (path, text) in sources() {
        let place = path.to_str().unwrap().replace('\\', "/");
        if MAY_BE_UNSAFE.iter().any(|prefix| place.starts_with(prefix)) {
            continue;
        }
        let code = |line: &str| !line.trim_start().starts_with("//") && line.contains("unsafe ");
        let mut lines = text.lines().enumerate().filter(|(_, line)| code(line));
        if LAUNCHERS.iter().any(|prefix| place.starts_with(prefix)) {
            let launch = lines.next();
            assert!(launch.is_none_or(|(_, line)| line.contains(".launch(")), "{place}: {launch:?}");
        }
        let more = lines.next();
        assert!(more.is_none(), "{place}: {more:?}");
    }
}

/// In the Python package: where tensors of other libraries come in and go out, and once where their streams do.
#[test]
fn unsafe_code_of_the_python_package_handles_foreign_tensors() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("halfbyte-python/src");
    for path in files(&root, &["rs"]) {
        let text = std::fs::read_to_string(&path).unwrap();
        let place = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        let blocks =
            text.lines().filter(|line| !line.trim_start().starts_with("//") && line.contains("unsafe ")).count();
        let most = if place == "device.rs" { 1 } else { 0 };
        assert!(place.starts_with("tensor/") || blocks <= most, "{place}: {blocks} lines with unsafe code");
    }
}

/// A processor that has all kernels.
fn hopper() -> halfbyte::cuda::sources::Arch {
    halfbyte::cuda::sources::Arch::of([9, 0])
}

#[test]
fn every_kernel_is_a_file_of_its_name() {
    let files: Vec<PathBuf> = sources().into_iter().map(|(path, _)| path).collect();
    for kernel in halfbyte::cpu::matmul::KERNELS {
        let expected = Path::new("cpu/matmul").join(format!("{}.rs", kernel.name));
        assert!(files.contains(&expected), "no {}", expected.display());
    }
    for kernel in halfbyte::cuda::matmul::KERNELS {
        let expected = Path::new("cuda/matmul").join(format!("{}.rs", kernel.name));
        assert!(files.contains(&expected), "no {}", expected.display());
        let instances = (kernel.instances)(hopper());
        assert!(!instances.is_empty(), "{} has no instances", kernel.name);
        for instance in instances {
            // One of another name is a file of its own.
            let stem = instance.source.path.trim_start_matches("matmul/").trim_end_matches(".cu");
            let expected = Path::new("cuda/matmul").join(format!("{stem}.rs"));
            assert!(files.contains(&expected), "no {}", expected.display());
            assert!(instance.expression.starts_with(stem), "{instance}");
        }
    }
}

#[test]
fn gpu_sources_include_nothing_but_our_headers() {
    use halfbyte::cuda::sources::HEADERS;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let on_disk = std::fs::read_dir(root.join("include")).unwrap().count();
    assert_eq!(HEADERS.len(), on_disk, "every header is handed to the compiler");
    let kernels = halfbyte::cuda::matmul::KERNELS.iter().flat_map(|kernel| (kernel.instances)(hopper()));
    let kernels = kernels.map(|instance| instance.source);
    let others = [
        halfbyte::cuda::nn::instances(hopper(), None, &halfbyte::kernel::KvType::ALL),
        halfbyte::cuda::nn::instances_of_experts(hopper()),
        halfbyte::cuda::nn::instances_of_hopper(),
    ]
    .concat()
    .into_iter()
    .map(|instance| instance.source);
    for source in HEADERS.iter().chain(kernels).chain(others) {
        assert_eq!(std::fs::read_to_string(root.join(source.path)).unwrap(), source.text);
        for line in source.text.lines().filter(|line| line.trim_start().starts_with("#include")) {
            let ours = HEADERS.iter().any(|header| line.trim() == format!("#include \"{}\"", header.name()));
            assert!(ours, "{}: {line}", source.path);
        }
    }
}

#[test]
fn the_example_of_the_readme_differs_on_a_gpu_in_one_line() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("../../README.md")).unwrap();
    let library = std::fs::read_to_string(root.join("src/lib.rs")).unwrap();
    let between = |text: &str, begin: &str| text.split(begin).nth(1).unwrap().split("```").next().unwrap().to_owned();
    let on_cpu = between(&readme, "```rust\n");
    let on_gpu = between(&library, "```no_run\n");
    let on_gpu: Vec<&str> = on_gpu.lines().map(|line| line.trim_start_matches("//!")).collect();
    let on_gpu: Vec<&str> = on_gpu.into_iter().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let lines: Vec<(&str, &str)> = on_cpu.lines().zip(on_gpu.iter().copied()).collect();
    let different: Vec<_> = lines.iter().filter(|(a, b)| a != b && !a.starts_with("use ")).collect();
    assert!(lines.len() > 10 && on_cpu.lines().count() + 1 == on_gpu.len(), "{on_cpu}\n{on_gpu:?}");
    let [(a, b)] = different[..] else { panic!("{different:?}") };
    assert!(a.contains("let device = Cpu::all_threads()?;") && b.trim() == "let device = Cuda::open(0)?;", "{a}\n{b}");
}

/// Structs that Rust and C++ share are declared by the macro that records how they lie, and every source names those that its
/// kernels take: then the compiler compares them (`cuda/parameters.rs`).
#[test]
fn parameters_of_gpu_kernels_are_checked_structs() {
    for (path, text) in sources().into_iter().filter(|(path, _)| path.starts_with("cuda")) {
        // Declares them; structs of libraries of NVIDIA's.
        let may = ["cuda/parameters.rs", "cuda/cublaslt.rs", "cuda/nccl.rs"].iter().any(|file| path == Path::new(file));
        assert!(may || !text.contains("repr(C)"), "{}: declared by parameters!", path.display());
    }
    use halfbyte::cuda::{conv, int8, matmul, nn, roofline};
    let products = matmul::KERNELS.iter().flat_map(|kernel| (kernel.instances)(hopper())).chain(matmul::auxiliary());
    let convolutions = conv::KERNELS.iter().flat_map(|kernel| (kernel.instances)());
    let of_bytes = int8::KERNELS.iter().flat_map(|kernel| (kernel.instances)());
    let others = [
        nn::instances(hopper(), None, &halfbyte::kernel::KvType::ALL),
        nn::instances_of_experts(hopper()),
        nn::instances_of_hopper(),
    ]
    .concat()
    .into_iter()
    .chain(roofline::instances());
    for instance in products.chain(convolutions).chain(of_bytes).chain(others) {
        let source = instance.source;
        for declared in source.text.split("__global__").skip(1) {
            for of_kernel in parameter_types(declared) {
                let named = source.parameters.iter().any(|layout| layout.name == of_kernel);
                // What is given to the products on Hopper: `Arguments`, or those with windows.
                let given = of_kernel == "Given" && !source.parameters.is_empty();
                assert!(named || given, "{instance} takes {of_kernel}, which its source does not name");
            }
        }
    }
}

/// The structs that a kernel takes by value, but for tensor maps, out of what follows `__global__`.
fn parameter_types(declared: &str) -> Vec<&str> {
    let (before, mut rest) = declared.split_once('(').unwrap();
    if before.ends_with("__launch_bounds__") {
        // Behind the parenthesis that closes it.
        let mut depth = 1;
        let end = rest.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        (_, rest) = rest[end.unwrap()..].split_once('(').unwrap();
    }
    let (parameters, _) = rest.split_once(')').unwrap();
    let types = parameters.split(',').filter(|parameter| !parameter.contains('*') && !parameter.trim().is_empty()).map(
        |parameter| {
            let words = parameter.split_whitespace().filter(|word| !["const", "__grid_constant__"].contains(word));
            words.into_iter().next().unwrap()
        },
    );
    types.filter(|name| !["u16", "u32", "u64", "float", "TensorMap"].contains(name)).collect()
}

#[test]
fn files_are_short_and_lines_of_gpu_sources_fit_a_screen() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let all = files(root, &["rs", "cu", "cuh"]);
    assert!(all.len() > 300, "found only {} files", all.len());
    for path in all {
        let text = std::fs::read_to_string(&path).unwrap();
        let place = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
        let extension = path.extension().unwrap().to_str().unwrap();
        let (_, most) = MOST_LINES.iter().find(|(of, _)| *of == extension).unwrap();
        let lines = text.lines().count();
        assert!(lines <= *most, "{place} has {lines} lines, at most {most}");
        for (number, line) in text.lines().enumerate().filter(|_| extension != "rs") {
            assert!(line.chars().count() <= 120, "{place}:{}: {} columns", number + 1, line.chars().count());
        }
    }
}
