//! Every kernel compiles for every processor it is written for, without a device; what it takes is held on record.

use super::products::{WIDE, formats_of_atoms};
use super::{in_child, is_child, nvrtc};
use crate::data::parse;
use halfbyte::cuda::cache::Key;
use halfbyte::cuda::driver::Version;
use halfbyte::cuda::matmul::{self, KERNELS, wna8_sm90, wna16_sm90};
use halfbyte::cuda::nvrtc::Nvrtc;
use halfbyte::cuda::sources::{ARCH_VARIABLE, Arch, Instance, Source};
use halfbyte::cuda::tiled::{Form, Tile};
use halfbyte::cuda::{Caps, conv, int8, nn, roofline};
use halfbyte::kernel::{Activation, KvType, Problem};
use halfbyte::layout::cuda_wna16::Atom;
use halfbyte::{Error, Float};
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::path::Path;

const ARCHS: [&str; 5] = ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_120a"];

/// The record: rewritten by `HALFBYTE_BLESS=1`.
const RECORD: &str = "tests/it/cuda/resources.txt";

/// The version of NVRTC that the record was made with; others may allot registers differently.
const RECORDED_WITH: &str = "13.0";

#[derive(Debug, PartialEq)]
struct Taken {
    registers: u32,
    shared_bytes: u32,
    stack_bytes: u32,
    spilled_bytes: u32,
}

/// Options with which the assembler tells what a kernel takes: also of one that NVRTC finds in a cache of its own.
fn told(nvrtc: &Nvrtc) -> &'static [&'static str] {
    let cached = nvrtc.version() >= Version { major: 13, minor: 0 };
    if cached { &["--ptxas-options=-v", "--no-cache"] } else { &["--ptxas-options=-v"] }
}

/// What the assembler says of a kernel with `-v`.
fn taken(log: &str) -> Taken {
    let number = |before: &str, after: &str| -> Option<u32> {
        let line = log.lines().find(|line| line.contains(before) && line.contains(after))?;
        let text = &line[..line.find(after)?];
        let digits = text.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    };
    Taken {
        registers: number("Used", " registers").expect(log),
        shared_bytes: number("Used", " bytes smem").unwrap_or(0),
        stack_bytes: number("stack frame", " bytes stack frame").expect(log),
        spilled_bytes: number("spill", " bytes spill stores").expect(log)
            + number("spill", " bytes spill loads").expect(log),
    }
}

/// One in so many kernels, by what its source hashes to, is compiled although it is on record.
const SOME: u64 = 40;

/// Kernels that are not on record as they are now are compiled, and a sample of the others.
#[test]
fn every_kernel_compiles_for_every_processor_and_takes_what_is_recorded() {
    compile_and_compare(SOME);
}

#[test]
#[ignore = "ten minutes; run with: cargo test --test it -- --ignored every_kernel_compiles_although"]
fn every_kernel_compiles_although_it_is_on_record() {
    compile_and_compare(1);
}

/// What is on record of a kernel: its name for a processor, what it takes, and what its source, headers and options hash to.
#[derive(Clone, Copy, PartialEq)]
struct Line<'a> {
    name: &'a str,
    takes: &'a str,
    content: &'a str,
}

impl<'a> Line<'a> {
    fn of(line: &'a str) -> Self {
        let (rest, content) = line.rsplit_once(", ").expect(line);
        let (name, takes) = rest.rsplit_once(": ").expect(line);
        Self { name, takes, content }
    }
}

/// Compiles what is not on record, and one in `step` of what is; compares with the record.
fn compile_and_compare(step: u64) {
    let Some(nvrtc) = nvrtc() else { return };
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORD)).unwrap_or_default();
    let comparable = nvrtc.version().to_string() == RECORDED_WITH;
    let recorded: HashMap<&str, Line<'_>> = text.lines().map(Line::of).map(|line| (line.name, line)).collect();
    let mut record = String::new();
    let (mut differ, mut failed) = (Vec::new(), Vec::new());
    for arch in ARCHS.map(|arch| arch.parse::<Arch>().unwrap()).into_iter().filter(|&arch| nvrtc.knows(arch)) {
        let products = KERNELS.iter().filter(|kernel| (kernel.serves)(arch)).map(|kernel| (kernel.instances)(arch));
        let mut seen = HashSet::new();
        let convolutions =
            conv::KERNELS.iter().filter(|kernel| (kernel.serves)(arch)).map(|kernel| (kernel.instances)());
        let of_bytes = int8::KERNELS.iter().filter(|kernel| (kernel.serves)(arch)).map(|kernel| (kernel.instances)());
        let of_hopper = if arch.is_hopper() { nn::instances_of_hopper() } else { Vec::new() };
        let of_experts = nn::instances_of_experts(arch);
        let others = [nn::instances(arch, None, &KvType::ALL), of_experts, of_hopper, matmul::auxiliary()];
        for mut instances in products.chain(convolutions).chain(of_bytes).chain(others) {
            instances.retain(|instance| seen.insert(instance.to_string()));
            instances.sort_by_key(Instance::to_string);
            let lines: Vec<Result<(String, Option<String>), String>> = instances
                .par_iter()
                .map(|instance| {
                    let content = Key::of(instance, arch).unwrap().content()[..16].to_owned();
                    let sampled = u64::from_str_radix(&content, 16).unwrap().is_multiple_of(step);
                    let name = format!("{arch} {instance}");
                    let known = recorded.get(name.as_str()).filter(|line| comparable && line.content == content);
                    let takes = match known {
                        Some(line) if !sampled => line.takes.to_owned(),
                        None if !sampled && !comparable => String::new(),
                        _ => compile(nvrtc, instance, arch)?,
                    };
                    let was = known.map(|line| line.takes.to_owned()).filter(|was| *was != takes);
                    Ok((format!("{name}: {takes}, {content}"), was))
                })
                .collect();
            for line in lines {
                match line {
                    Ok((line, was)) => {
                        differ.extend(was.map(|was| format!("{line}; on record: {was}")));
                        writeln!(record, "{line}").unwrap();
                    }
                    Err(why) => failed.push(why),
                }
            }
        }
    }
    let blesses = comparable && std::env::var_os("HALFBYTE_BLESS").is_some() && step > 1;
    if blesses {
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORD), &record).unwrap();
    }
    assert!(failed.is_empty(), "{} kernels: {}", failed.len(), failed.join("\n"));
    if blesses || !comparable {
        return;
    }
    assert!(differ.is_empty(), "the same source takes other registers: {differ:#?}");
    let [now, was] = [record.as_str(), text.as_str()].map(|text| text.lines().collect::<HashSet<_>>());
    let other = now.symmetric_difference(&was).collect::<Vec<_>>();
    assert!(other.is_empty(), "HALFBYTE_BLESS=1 records anew: {other:#?}");
}

/// Compiles a kernel without warnings and spills, and says what it takes. Error: it has some, or none can be made of it.
fn compile(nvrtc: &Nvrtc, instance: &Instance, arch: Arch) -> Result<String, String> {
    let (compiled, log) = nvrtc.compile_with(instance, arch, told(nvrtc)).map_err(|e| e.to_string())?;
    let what = format!("{instance} for {arch}:\n{log}");
    if !compiled.code.starts_with(b"\x7fELF") {
        return Err(format!("no ELF file: {what}"));
    }
    // Anything else that the compiler says is a warning; "serialized" is how it tells, as an info, that it waits after each
    // wgmma (C7514).
    let said = |line: &&str| {
        let info = line.is_empty() || line.starts_with("ptxas info") || line.contains("spill");
        !info || line.contains("serialized")
    };
    if log.lines().any(|line| said(&line)) {
        return Err(format!("a warning: {what}"));
    }
    let Taken { registers, shared_bytes, stack_bytes, spilled_bytes } = taken(&log);
    if (stack_bytes, spilled_bytes) != (0, 0) {
        return Err(format!("spills: {what}"));
    }
    Ok(format!("{registers} registers, {shared_bytes} bytes shared"))
}

/// What a sweep measures compiles, and lies in registers.
#[test]
fn candidates_compile_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = "sm_90a".parse::<Arch>().unwrap();
    let atoms = [
        (Atom::W4_G128, Float::F16),
        (Atom { bits: 8, group: 32, zero: true, scale: Float::BF16, ..Atom::W4_G128 }, Float::F32),
        (Atom { group: 32, scale: Float::F32, offset: true, ..Atom::W4_G128 }, Float::F32),
        (Atom { bits: 8, group: 16, zero: false, scale: Float::F32, ..Atom::W4_G128 }, Float::F16),
        (Atom { bits: 5, group: 32, offset: true, scale: Float::F32, multiples: true, ..Atom::W4_G128 }, Float::F32),
        (Atom { table: Some(Atom::A_TABLE), group: 32, ..Atom::W4_G128 }, Float::F32),
    ];
    for (atom, out) in atoms {
        let of = |m| wna16_sm90::candidates(&Form::floats(atom, out), m, &Caps { rounded_weights: true, ..Caps::H200 });
        let all: Vec<_> = [8, 32, 64, 256].into_iter().flat_map(of).collect();
        assert!(all.len() > if atom.is_wide() { 12 } else { 30 }, "{}", all.len());
        // Some of each kind: the whole takes minutes.
        all.iter().step_by(all.len() / 5).for_each(|config| {
            let instance = config.instance(&Form::floats(atom, out), Activation::None);
            let (_, log) = nvrtc.compile_with(&instance, arch, told(nvrtc)).unwrap();
            let taken = taken(&log);
            assert_eq!((taken.stack_bytes, taken.spilled_bytes), (0, 0), "{config}:\n{log}");
        });
    }
}

/// What may be chosen for a shape lies in registers, in every form of weights and with the epilogue that takes most.
#[test]
#[ignore = "a quarter of an hour; run with: cargo test --test it -- --ignored every_choice_compiles"]
fn every_choice_compiles_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = "sm_90a".parse::<Arch>().unwrap();
    let plain = |bits, group, zero, scale| Atom { bits, group, zero, scale, ..Atom::W4_G128 };
    let wide = |bits, group, offset, scale| Atom { bits, group, offset, scale, ..Atom::W4_G128 };
    let of_halves = |bits, group, offset| Atom { multiples: true, ..wide(bits, group, offset, Float::F32) };
    let atoms = [
        plain(4, 128, false, Float::F16),
        plain(4, 32, true, Float::BF16),
        plain(4, 64, false, Float::BF16),
        plain(4, 0, true, Float::F16),
        plain(8, 128, true, Float::F16),
        plain(8, 32, true, Float::BF16),
        plain(8, 64, false, Float::F16),
        plain(8, 0, true, Float::F16),
        wide(4, 32, true, Float::F32),
        wide(4, 64, true, Float::F16),
        wide(8, 32, true, Float::F32),
        wide(8, 64, true, Float::BF16),
        wide(8, 16, false, Float::F32),
        wide(4, 16, false, Float::F32),
        of_halves(4, 32, true),
        of_halves(5, 32, true),
        of_halves(6, 16, false),
        of_halves(3, 16, false),
        plain(5, 32, false, Float::F16),
        Atom { table: Some(Atom::A_TABLE), ..plain(4, 32, false, Float::BF16) },
        Atom { table: Some(Atom::A_TABLE), ..plain(4, 16, false, Float::F16) },
    ];
    let forms = atoms.into_iter().enumerate().flat_map(|(i, atom)| {
        let out = [Float::F16, Float::F32, Float::BF16][i % 3];
        // With x in bf16 some for codes in planes with offsets do not (docs/decisions/0025).
        let spills = atom.bits == 5 && atom.offset;
        let types = match atom.scale {
            Float::F32 if spills => vec![Float::F16],
            Float::F32 => vec![Float::F16, Float::BF16],
            _ => vec![Float::F16, Float::BF16],
        };
        types.into_iter().map(move |x| Form { x, ..Form::floats(atom, out) })
    });
    let of = |form: Form| {
        let every = wna16_sm90::config::every(&form).into_iter();
        every.map(move |config| config.instance(&form, Activation::GeluTanh))
    };
    let all: Vec<_> = forms.flat_map(of).collect();
    none_spills(nvrtc, arch, &all);
}

/// None of these spills.
pub(super) fn none_spills(nvrtc: &Nvrtc, arch: Arch, all: &[Instance]) {
    let spilled = all.par_iter().filter_map(|instance| {
        let (_, log) = nvrtc.compile_with(instance, arch, told(nvrtc)).unwrap_or_else(|e| panic!("{e}"));
        let taken = taken(&log);
        ((taken.stack_bytes, taken.spilled_bytes) != (0, 0)).then(|| format!("{instance}: {taken:?}"))
    });
    let spilled: Vec<String> = spilled.collect();
    assert!(spilled.is_empty(), "{} of {} for {arch}: {spilled:#?}", spilled.len(), all.len());
}

/// So does what may be chosen for quantised activations.
#[test]
#[ignore = "minutes; run with: cargo test --test it -- --ignored every_choice_for_codes"]
fn every_choice_for_codes_compiles_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = "sm_90a".parse::<Arch>().unwrap();
    let names = [
        "w8a8",
        "w8a8-asym-xasym",
        "w4a8",
        "w4a8-g128",
        "w4a8-g128-asym-xasym-sf32",
        "w4a8-g32-asym-xasym",
        "w8a8-g64",
        "w8a8-g32-asym-xasym",
        "w8a8-g64-float-xasym-sbf16",
        "w4a8-g32-float-sf32",
        "w4a8-g128-si8",
        "w4a8-g32-xasym-sbf16-si8",
        "w2a8-g64",
        "w3a8-g32-asym",
    ];
    let of = |(i, name): (usize, &&str)| {
        let y = [Float::F16, Float::F32][i % 2];
        let problem = Problem { format: Some(parse(name)), x: Float::F16, y, m: 1, n: 4096, k: 4096 };
        let (atom, terms) = wna8_sm90::form(None, &problem).unwrap();
        let form = Form::codes(atom, terms, y);
        let every = wna8_sm90::config::every(atom, terms, y).into_iter();
        every.map(move |config| config.instance(&form, Activation::None))
    };
    let all: Vec<_> = names.iter().enumerate().flat_map(of).collect();
    none_spills(nvrtc, arch, &all);
}

/// Products by mma.sync lie in registers too, in every form of weights, also where copies wait there.
#[test]
#[ignore = "minutes; run with: cargo test --test it -- --ignored every_product_by_mma_sync"]
fn every_product_by_mma_sync_compiles_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    const QUANTIZED: [&str; 24] = [
        "w4a8-g128-si8",
        "w4a8-g64-asym-si8",
        "w4a8-g32-xasym-sbf16-si8",
        "w4a8-g128",
        "w4a8-g128-asym",
        "w4a8-g32-asym",
        "w4a8-g64-xasym",
        "w4a8-g128-asym-xasym",
        "w4a8-g32-float-xasym",
        "w4a8",
        "w4a8-asym-xasym",
        "w8a8-g128",
        "w8a8-g64-asym-xasym-sbf16",
        "w8a8",
        "w8a8-xasym",
        "w8a8-g32-asym-xasym",
        "w3a8-g128-asym",
        "w2a8-g64-asym",
        "w8a8-g32-float-xasym",
        "w4a8-g16-asym-xasym",
        "w8a8-g16-sf32",
        "w3a8-g16-xasym-sf32",
        "w2a8-g16-float-xasym-sf32",
        "w8a8-g48-float",
    ];
    let names = formats_of_atoms().into_iter().chain(WIDE.into_iter().chain(QUANTIZED).map(String::from));
    let names: Vec<String> = names.collect();
    for arch in ["sm_75", "sm_80"].map(|arch| arch.parse::<Arch>().unwrap()) {
        let kernels = KERNELS.iter().filter(|kernel| kernel.name.ends_with("_mma"));
        let mut seen = HashSet::new();
        let all: Vec<Instance> = kernels
            .flat_map(|kernel| {
                let of = |(i, name): (usize, &String)| {
                    (kernel.every_instance)(arch, parse(name), [Float::F16, [Float::F16, Float::F32][i % 2]])
                };
                names.iter().enumerate().flat_map(of).collect::<Vec<_>>()
            })
            .filter(|instance| seen.insert(instance.to_string()))
            .collect();
        let spilling = all.par_iter().filter_map(|instance| {
            let (_, log) = nvrtc.compile_with(instance, arch, told(nvrtc)).unwrap_or_else(|e| panic!("{e}"));
            (taken(&log).spilled_bytes > 0).then(|| format!("{instance}: {log}"))
        });
        let spilling: Vec<String> = spilling.collect();
        assert!(spilling.is_empty(), "{} of {} for {arch}: {spilling:#?}", spilling.len(), all.len());
    }
}

/// One in so many forms is compiled.
const SOME_FORMS: usize = 40;

/// Implicit products have many forms too: none spills, whatever the format.
#[test]
fn forms_of_implicit_products_compile_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = "sm_90a".parse::<Arch>().unwrap();
    let formats = [
        "w4a16-asym",
        "w8a16-asym-sbf16",
        "w4a16-g32-asym-sbf16",
        "w8a16-g64-asym",
        "w8a16-g128-asym",
        "w8a8",
        "w4a8-g32-asym-xasym",
    ];
    let kernels = conv::KERNELS.iter().filter(|kernel| (kernel.serves)(arch));
    let of = |kernel: &conv::Kernel| formats.map(|name| (kernel.every_instance)(arch, parse(name))).concat();
    let all: Vec<Instance> = kernels.flat_map(of).collect();
    assert!(all.len() > 80, "{}", all.len());
    // Some of each format: the whole takes minutes.
    let some: Vec<Instance> = all.into_iter().step_by(SOME_FORMS).collect();
    none_spills(nvrtc, arch, &some);
}

#[test]
fn what_is_launched_beside_products_compiles_for_every_processor() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in ARCHS.map(|arch| arch.parse::<Arch>().unwrap()).into_iter().filter(|&arch| nvrtc.knows(arch)) {
        for instance in roofline::instances() {
            let (_, log) = nvrtc.compile_with(&instance, arch, &[]).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(log, "", "{instance} for {arch}");
        }
    }
}

#[test]
fn what_the_compiler_says_is_in_the_error() {
    let Some(nvrtc) = nvrtc() else { return };
    static WRONG: Source = Source {
        path: "test/wrong.cu",
        text: "#include \"ptx.cuh\"\n__global__ void f() { u32 x = y; }",
        parameters: &[],
    };
    let instance = Instance::new(&WRONG, "f");
    let arch: Arch = "sm_90a".parse().unwrap();
    match nvrtc.compile(&instance, arch).unwrap_err() {
        Error::Compile { kernel, arch, log } => {
            assert_eq!((kernel.as_str(), arch.as_str()), ("f of test/wrong.cu", "sm_90a"));
            assert!(log.contains("test/wrong.cu(2)") && log.contains("\"y\" is undefined"), "{log}");
        }
        other => panic!("{other}"),
    }
    static RIGHT: Source =
        Source { path: "test/right.cu", text: "template <int V> __global__ void f() {}", parameters: &[] };
    for expression in ["g<1>", "f<int>", "f<1"] {
        let instance = Instance::new(&RIGHT, expression);
        assert!(
            matches!(nvrtc.compile(&instance, arch), Err(Error::Compile { .. } | Error::Device { .. })),
            "{expression}"
        );
    }
    let instance = Instance::new(&RIGHT, "f<1>");
    assert!(nvrtc.compile(&instance, arch).unwrap().name.contains('f'));
    let error = nvrtc.compile(&instance, "sm_10".parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("knows only") && error.contains("sm_90"), "{error}");
    assert!(!error.contains("HALFBYTE_CUDA_ARCH"), "{error}");
    // What is not known yet runs code of what is.
    let error = nvrtc.compile(&instance, "sm_990".parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("knows only") && error.contains("HALFBYTE_CUDA_ARCH=compute_"), "{error}");
    // A kernel that is no template, and definitions.
    static DEFINED: Source = Source {
        path: "test/defined.cu",
        text: "extern \"C\" __global__ void f(int* y) { *y = A + B; }",
        parameters: &[],
    };
    let defined = Instance::new(&DEFINED, "f");
    assert!(nvrtc.compile(&defined, arch).is_err());
    let [three, four] = ["A=3", "A=4"].map(|a| defined.clone().with([a.to_owned(), "B=(1 + 1)".to_owned()]));
    assert_eq!(nvrtc.compile(&three, arch).unwrap().name, "f");
    assert_ne!(nvrtc.compile(&three, arch).unwrap().code, nvrtc.compile(&four, arch).unwrap().code);
    assert_ne!(Key::of(&three, arch).unwrap(), Key::of(&four, arch).unwrap());
    assert_eq!(four.to_string(), "f of test/defined.cu with A=4 B=(1 + 1)");
    static ZERO: Source = Source { path: "test/zero.cu", text: "__global__ void f() {}\0", parameters: &[] };
    assert!(nvrtc.compile(&Instance::new(&ZERO, "f"), arch).is_err());
}

#[test]
fn processors_are_written_as_the_field_does() {
    for text in ["sm_75", "sm_90a", "sm_120a", "compute_75"] {
        assert_eq!(text.parse::<Arch>().unwrap().to_string(), text);
    }
    for text in ["", "90", "sm_", "sm_a", "sm_9", "sm_90b", "sm_+90", "compute_", "compute75"] {
        assert!(text.parse::<Arch>().is_err(), "{text}");
    }
    assert_eq!(
        [[7, 5], [8, 9], [9, 0], [12, 0]].map(|c| Arch::of(c).to_string()),
        ["sm_75", "sm_89", "sm_90a", "sm_120a"]
    );
}

#[test]
fn an_older_processor_is_run_where_the_environment_names_one() {
    const TEST: &str = "cuda::nvrtc::an_older_processor_is_run_where_the_environment_names_one";
    const NAMES: [&str; 4] = ["", "compute_75", "compute_80", "compute_90"];
    const REFUSED: [&str; 5] = ["compute_100", "sm_75", "compute_90a5", "75", "turing"];
    if !is_child() {
        return NAMES.into_iter().chain(REFUSED).for_each(|name| in_child(TEST, &[(ARCH_VARIABLE, name)]));
    }
    let asked = std::env::var(ARCH_VARIABLE).unwrap();
    match Arch::of_device([9, 0]) {
        Ok(arch) => {
            assert!(NAMES.contains(&asked.as_str()), "{asked}");
            assert_eq!(arch.to_string(), if asked.is_empty() { "sm_90a" } else { &asked });
        }
        Err(why) => {
            assert!(REFUSED.contains(&asked.as_str()), "{asked}");
            let expected = format!("{ARCH_VARIABLE}: expected a virtual processor as compute_75, at most compute_90");
            assert!(why.to_string().starts_with(&expected) && why.to_string().contains(&asked), "{why}");
        }
    }
}

#[test]
fn code_for_a_virtual_processor_is_a_text_that_ends_with_a_zero() {
    let Some(nvrtc) = nvrtc() else { return };
    let instance = roofline::instances().into_iter().next().unwrap();
    let code = nvrtc.compile(&instance, "compute_75".parse().unwrap()).unwrap().code;
    let text = std::ffi::CStr::from_bytes_with_nul(&code).unwrap().to_str().unwrap();
    assert!(text.contains(".target sm_75"), "{text}");
}
