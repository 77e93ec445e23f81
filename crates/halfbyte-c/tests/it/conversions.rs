//! `halfbyte/conversions.cuh`: on a host by the C++ compiler, to the bit by definition and as other software has it; for GPUs by NVRTC,
//! and on one if there is one. `tests/conversions/nvcc.sh` does the same with nvcc.

use half::{bf16, f16};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Arg, Launch};
use halfbyte::cuda::nvrtc::Nvrtc;
use halfbyte::cuda::sources::{Instance, Source};
use safetensors::SafeTensors;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// What a conversion is by its definition.
struct Case {
    name: &'static str,
    bits: u32,
    /// The bit of the word that the code of each element begins at.
    begins: &'static [u32],
    /// Zero points to try.
    zeros: std::ops::RangeInclusive<u32>,
    /// What stands for zero in elements of even and odd registers.
    zero: fn(u32) -> [u32; 2],
    half: fn(f32) -> u16,
    /// Bits that are turned over first.
    turned: u32,
}

fn of_f16(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

fn of_bf16(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

const INTERLEAVED: &[u32] = &[0, 16, 4, 20, 8, 24, 12, 28];
const LINEAR: &[u32] = &[0, 4, 8, 12, 16, 20, 24, 28];
const BYTES: &[u32] = &[0, 8, 16, 24];
const BYTES_INTERLEAVED: &[u32] = &[0, 16, 8, 24];

const fn case(
    name: &'static str,
    bits: u32,
    begins: &'static [u32],
    most: u32,
    zero: fn(u32) -> [u32; 2],
    half: fn(f32) -> u16,
) -> Case {
    Case { name, bits, begins, zeros: 0..=most, zero, half, turned: 0 }
}

static CASES: [Case; 15] = [
    case("int4_interleaved_half_0", 4, INTERLEAVED, 0, |_| [0; 2], of_f16),
    case("int4_interleaved_half_8", 4, INTERLEAVED, 0, |_| [8; 2], of_f16),
    case("int4_interleaved_half_15", 4, INTERLEAVED, 0, |_| [15; 2], of_f16),
    case("int4_interleaved_bf16_0", 4, INTERLEAVED, 0, |_| [0; 2], of_bf16),
    case("int4_interleaved_bf16_8", 4, INTERLEAVED, 0, |_| [8; 2], of_bf16),
    case("int4_interleaved_bf16_15", 4, INTERLEAVED, 0, |_| [15; 2], of_bf16),
    case("int4_linear_half_8", 4, LINEAR, 0, |_| [8; 2], of_f16),
    case("int4_linear_bf16_8", 4, LINEAR, 0, |_| [8; 2], of_bf16),
    case("int4_fragment_half", 4, INTERLEAVED, 16, |zero| [zero, 16 - zero], of_f16),
    case("int4_fragment_bf16", 4, INTERLEAVED, 16, |zero| [zero, 16 - zero], of_bf16),
    case("int8_interleaved_half", 8, BYTES_INTERLEAVED, 255, |zero| [zero; 2], of_f16),
    case("int8_linear_half", 8, BYTES, 255, |zero| [zero; 2], of_f16),
    case("int8_interleaved_bf16", 8, BYTES_INTERLEAVED, 0, |_| [128; 2], of_bf16),
    case("int8_linear_bf16", 8, BYTES, 0, |_| [128; 2], of_bf16),
    Case {
        name: "int8_biased_bf16",
        bits: 8,
        begins: BYTES,
        zeros: 0..=0,
        zero: |_| [128; 2],
        half: of_bf16,
        turned: 0x8080_8080,
    },
];

impl Case {
    fn registers(&self) -> usize {
        self.begins.len() / 2
    }

    /// The registers that a word becomes.
    fn by_definition(&self, word: u32, zero: u32) -> Vec<u32> {
        let (word, zeros) = (word ^ self.turned, (self.zero)(zero));
        let half = |element: usize| {
            let code = word >> self.begins[element] & ((1 << self.bits) - 1);
            u32::from((self.half)(code as f32 - zeros[element / 2 % 2] as f32))
        };
        (0..self.registers()).map(|register| half(2 * register) | half(2 * register + 1) << 16).collect()
    }

    /// Compares what words have become.
    fn check(&self, words: &[u32], zero: u32, got: &[u32], by: &str) {
        assert_eq!(got.len(), words.len() * self.registers(), "{} by {by}", self.name);
        for (&word, got) in words.iter().zip(got.chunks_exact(self.registers())) {
            let want = self.by_definition(word, zero);
            assert_eq!(got, want, "{} of {word:#x}, zero {zero}, by {by}", self.name);
        }
    }

    /// What the C++ compiler of this machine makes of it.
    fn on_host(&self, program: &Path, words: &[u32], zero: u32) -> Vec<u32> {
        let mut child = Command::new(program)
            .args([self.name, &zero.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        assert!(output.status.success(), "{}: {}", self.name, output.status);
        words_of(&output.stdout)
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Says what is skipped, past the harness that keeps the output of tests that pass.
fn skip(required: &str, why: &str) {
    assert!(std::env::var(required).map_or(true, |value| value != "1"), "{required}=1, but {why}");
    let why = why.lines().next().unwrap_or_default();
    let _ = std::io::stderr().write_all(format!("skipped: conversions: {why}\n").as_bytes());
}

/// The program of the host, compiled once; none where there is no C++ compiler.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(compiled).as_deref()
}

fn compiled() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conversions");
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]).arg(root.join("include"));
    match command.arg("-o").arg(&program).arg(root.join("tests/conversions/host.cpp")).output() {
        Err(why) => {
            skip("HALFBYTE_REQUIRE_CXX", &format!("no C++ compiler {compiler}: {why}"));
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
    }
}

/// Every pattern in each half of a word, beside another one.
fn words() -> Vec<u32> {
    (0..=0xffff).map(|low: u32| low | (low ^ 0xa5c3) << 16).collect()
}

#[test]
fn on_a_host_conversions_are_what_they_are_by_definition() {
    let Some(program) = program() else { return };
    for case in &CASES {
        for zero in case.zeros.clone() {
            // All words for the first and the last zero points and those in the middle; some for the others.
            let all = zero % 64 == 0 || zero == *case.zeros.end();
            let words: Vec<u32> = words().into_iter().step_by(if all { 1 } else { 251 }).collect();
            case.check(&words, zero, &case.on_host(program, &words, zero), "the host");
        }
    }
}

#[test]
fn other_software_has_the_same_bits() {
    let Some(program) = program() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/fast_dequant");
    let mut compared = 0;
    let mut compare = |file: &str, tensor: &str, case: &str, zero: u32| {
        let bytes = std::fs::read(folder.join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words = words_of(tensors.tensor("reg").unwrap().data());
        let want = words_of(tensors.tensor(tensor).unwrap().data());
        let case = CASES.iter().find(|other| other.name == case).unwrap();
        assert_eq!(case.on_host(program, &words, zero), want, "{tensor} of {file}");
        compared += words.len();
    };
    let int4 = "int4_registers.safetensors";
    compare(int4, "awq_fp16", "int4_interleaved_half_0", 0);
    compare(int4, "ft_fp16", "int4_interleaved_half_8", 0);
    compare(int4, "ft_bf16", "int4_interleaved_bf16_8", 0);
    let int8 = "int8_registers.safetensors";
    compare(int8, "fp16_interleaved", "int8_interleaved_half", 128);
    compare(int8, "fp16_linear", "int8_linear_half", 128);
    compare(int8, "bf16_interleaved", "int8_interleaved_bf16", 0);
    compare(int8, "bf16_linear", "int8_linear_bf16", 0);
    assert_eq!(compared, 3 * 400 + 4 * 1536);
}

/// The header with a kernel for each conversion. NVRTC is given no other file.
static KERNELS: Source = Source {
    path: "test/conversions.cu",
    text: concat!(
        include_str!("../../include/halfbyte/conversions.cuh"),
        include_str!("../conversions/kernels.cuh"),
        include_str!("../conversions/cases.inc")
    ),
    parameters: &[],
};

#[test]
fn nvrtc_compiles_the_conversions_for_processors_with_their_instructions() {
    let nvrtc = match Nvrtc::open() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("HALFBYTE_REQUIRE_NVRTC", &format!("no NVRTC: {why}")),
    };
    for arch in ["sm_80", "sm_89", "sm_90a", "sm_120a"].map(|arch| arch.parse().unwrap()) {
        if nvrtc.knows(arch) {
            // The source has all of them: one is as good as another.
            let compiled =
                nvrtc.compile(&Instance::new(&KERNELS, CASES[0].name), arch).unwrap_or_else(|e| panic!("{e}"));
            for case in &CASES {
                let has = compiled.code.windows(case.name.len()).any(|name| name == case.name.as_bytes());
                assert!(has, "no {} for {arch}", case.name);
            }
        }
    }
}

#[test]
fn on_a_gpu_conversions_are_what_they_are_by_definition() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(why) => return skip("HALFBYTE_REQUIRE_CUDA", &format!("no GPU: {why}")),
    };
    let (stream, words) = (gpu.stream().unwrap(), words());
    for case in &CASES {
        let mut from = gpu.context().allocate::<u32>(words.len()).unwrap();
        let mut to = gpu.context().allocate::<u32>(words.len() * case.registers()).unwrap();
        stream.upload(&words, from.view_mut()).unwrap();
        for zero in case.zeros.clone() {
            let (words_at, out_at, count) = (from.view().pointer(), to.view_mut().pointer(), words.len() as u32);
            let args = [Arg::new(&words_at), Arg::new(&out_at), Arg::new(&count), Arg::new(&zero)];
            let launch = Launch::linear(count.div_ceil(256), 256);
            let function = gpu.function(&Instance::new(&KERNELS, case.name)).unwrap();
            // SAFETY: the kernel takes two addresses and two numbers, reads `count` words and writes as many times its registers.
            unsafe { function.launch(&stream, &launch, &args) }.unwrap();
            let mut got = vec![0; words.len() * case.registers()];
            stream.download(to.view(), &mut got).unwrap();
            case.check(&words, zero, &got, "a GPU");
        }
    }
}
