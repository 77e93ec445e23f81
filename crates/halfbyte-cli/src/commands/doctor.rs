//! `halfbyte doctor`: what this machine offers, and what of it is used.

use crate::app::App;
use crate::args::WeightKind;
use crate::failure::Result;
use crate::machine;
use crate::text::{Align, bytes, several, table};
use halfbyte::Float;
use halfbyte::cpu::isa::{Caps, Isa};
use halfbyte::cpu::matmul::{self, KERNELS};
use halfbyte::cuda::inventory;
use halfbyte::format::FORMATS;
use halfbyte::kernel::Problem;
use serde::Serialize;
use std::path::PathBuf;

/// Show the processor, its instruction sets, memory, GPUs with their libraries, and the kernels that serve here.
#[derive(Debug, clap::Args)]
pub struct Args {}

#[derive(Serialize)]
struct Doctor {
    version: &'static str,
    cpu: String,
    threads_available: usize,
    threads: usize,
    instruction_sets: Vec<&'static str>,
    isa_found: &'static str,
    isa_used: &'static str,
    isa_limit: Option<String>,
    bf16_dot: bool,
    last_level_cache_bytes: Option<u64>,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    cuda: Cuda,
    kernels: Vec<KernelLine>,
}

#[derive(Serialize)]
struct KernelLine {
    name: &'static str,
    what: &'static str,
    layout: &'static str,
    /// Of the listed formats and dense weights, with x in f32 and bf16 and m of 1 and 512: how many problems it is chosen for.
    serves: usize,
    of: usize,
}

/// What there is for GPUs; where something is not, why, with every place looked at.
#[derive(Serialize)]
struct Cuda {
    driver: Finding,
    devices: Vec<Device>,
    /// Why the devices cannot be listed, if the driver was found and they cannot.
    devices_error: Option<String>,
    nvrtc: Finding,
    cublaslt: Finding,
    cache: Finding,
    cache_kernels: usize,
    cache_bytes: u64,
    /// Why compiled kernels cannot be kept.
    cache_refusal: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Finding {
    Found { version: Option<String>, path: Option<PathBuf> },
    Missing { missing: String },
}

#[derive(Serialize)]
struct Device {
    index: u32,
    name: String,
    compute_capability: String,
    multiprocessors: u32,
    memory_bytes: u64,
    memory_available_bytes: u64,
}

impl Finding {
    fn of(found: halfbyte::Result<inventory::Found>) -> Self {
        match found {
            Ok(found) => Finding::Found { version: Some(found.version.to_string()), path: found.path },
            Err(why) => Finding::Missing { missing: why.to_string() },
        }
    }

    fn line(&self) -> String {
        match self {
            Finding::Found { version, path } => {
                let path = path.as_ref().map(|path| path.display().to_string());
                version.iter().cloned().chain(path).collect::<Vec<_>>().join(", ")
            }
            Finding::Missing { missing } => missing.replace('\n', &format!("\n{:19}", "")),
        }
    }
}

impl Cuda {
    fn of_this_machine() -> Self {
        let driver = Finding::of(inventory::driver());
        let (devices, devices_error) = match inventory::devices() {
            Ok(devices) => (devices, None),
            Err(_) if matches!(driver, Finding::Missing { .. }) => (Vec::new(), None),
            Err(why) => (Vec::new(), Some(why.to_string())),
        };
        let devices = devices
            .into_iter()
            .map(|device| Device {
                index: device.info.index,
                name: device.info.name,
                compute_capability: device.info.compute.map(|part| part.to_string()).join("."),
                multiprocessors: device.info.multiprocessors,
                memory_bytes: device.info.memory_bytes as u64,
                memory_available_bytes: device.free_bytes as u64,
            })
            .collect();
        let (cache, cache_kernels, cache_bytes, cache_refusal) = match inventory::cache() {
            Ok(cache) => {
                let found = Finding::Found { version: None, path: Some(cache.folder) };
                (found, cache.kernels, cache.bytes, cache.refusal)
            }
            Err(why) => (Finding::Missing { missing: why.to_string() }, 0, 0, None),
        };
        let (nvrtc, cublaslt) = (Finding::of(inventory::nvrtc()), Finding::of(inventory::cublaslt()));
        Self { driver, devices, devices_error, nvrtc, cublaslt, cache, cache_kernels, cache_bytes, cache_refusal }
    }

    fn lines(&self) -> Vec<(String, String)> {
        let mut lines = vec![("CUDA driver".to_owned(), self.driver.line())];
        lines.extend(self.devices_error.iter().map(|why| ("GPUs".to_owned(), why.clone())));
        for gpu in &self.devices {
            let line = format!(
                "{}, compute capability {}, {} multiprocessors, {}, {} available",
                gpu.name,
                gpu.compute_capability,
                gpu.multiprocessors,
                bytes(gpu.memory_bytes),
                bytes(gpu.memory_available_bytes)
            );
            lines.push((format!("GPU {}", gpu.index), line));
        }
        lines.push(("NVRTC".to_owned(), self.nvrtc.line()));
        lines.push(("cuBLASLt".to_owned(), self.cublaslt.line()));
        let refusal = match &self.cache_refusal {
            Some(why) => format!("; cannot be written ({why}): each process compiles its kernels"),
            None => String::new(),
        };
        let kept = format!(
            "{}, {}, {}{refusal}",
            self.cache.line(),
            several(self.cache_kernels, "kernel"),
            bytes(self.cache_bytes)
        );
        lines.push(("kernel cache".to_owned(), kept));
        lines
    }
}

/// Prints the findings.
pub fn run(_: &Args, app: &App) -> Result<()> {
    let (found, used) = (Caps::detect(), Caps::detect_within_environment()?);
    let problems: Vec<Problem> = FORMATS
        .iter()
        .copied()
        .chain(["f32"])
        .filter_map(|name| name.parse::<WeightKind>().ok())
        .flat_map(|kind| {
            [(Float::F32, 1), (Float::F32, 512), (Float::BF16, 1), (Float::BF16, 512)].map(|(x, m)| Problem {
                format: kind.format(),
                x,
                y: Float::F32,
                m,
                n: 4096,
                k: 4096,
            })
        })
        .collect();
    let serves = |name: &str| {
        problems.iter().filter(|problem| matmul::select(&used, problem).is_ok_and(|kernel| kernel.name == name)).count()
    };
    let kernels = KERNELS
        .iter()
        .map(|kernel| KernelLine {
            name: kernel.name,
            what: kernel.what,
            layout: kernel.layout,
            serves: serves(kernel.name),
            of: problems.len(),
        })
        .collect();
    let doctor = Doctor {
        version: env!("CARGO_PKG_VERSION"),
        cpu: machine::cpu_model(),
        threads_available: std::thread::available_parallelism().map_or(1, usize::from),
        threads: app.threads(),
        instruction_sets: machine::instruction_sets()
            .into_iter()
            .filter(|(_, has)| *has)
            .map(|(name, _)| name)
            .collect(),
        isa_found: found.isa.name(),
        isa_used: used.isa.name(),
        isa_limit: std::env::var_os("HALFBYTE_ISA").map(|isa| isa.to_string_lossy().into_owned()),
        bf16_dot: used.bf16_dot,
        last_level_cache_bytes: machine::last_level_cache(),
        memory_bytes: machine::memory_total(),
        memory_available_bytes: machine::memory_available(),
        cuda: Cuda::of_this_machine(),
        kernels,
    };
    app.result(&doctor, human)
}

/// How to use less than what was found; empty where there is nothing less.
fn less(found: &Caps) -> String {
    let less = Isa::ALL.into_iter().filter(|&isa| isa < found.isa && found.limited_to(isa).is_ok());
    let names: Vec<&str> = less.map(Isa::name).collect();
    match names.split_last() {
        None => String::new(),
        Some((last, [])) => format!(" (set HALFBYTE_ISA to {last} for less)"),
        Some((last, others)) => format!(" (set HALFBYTE_ISA to {} or {last} for less)", others.join(", ")),
    }
}

fn human(doctor: &Doctor) -> String {
    let size = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), bytes);
    let limit = match &doctor.isa_limit {
        Some(limit) => format!(" (limited by HALFBYTE_ISA={limit})"),
        None => less(&Caps::detect()),
    };
    let sets = if doctor.instruction_sets.is_empty() {
        "none that kernels use".into()
    } else {
        doctor.instruction_sets.join(" ")
    };
    let lines = [
        ("halfbyte", doctor.version.to_owned()),
        ("CPU", doctor.cpu.clone()),
        ("instruction sets", sets),
        ("kernels for", format!("{} found, {} used{limit}", doctor.isa_found, doctor.isa_used)),
        ("bf16 dot products", if doctor.bf16_dot { "used" } else { "not used" }.to_owned()),
        ("threads", format!("{} of {}", doctor.threads, doctor.threads_available)),
        ("last-level cache", size(doctor.last_level_cache_bytes)),
        ("memory", format!("{}, {} available", size(doctor.memory_bytes), size(doctor.memory_available_bytes))),
    ];
    let lines = lines.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(doctor.cuda.lines());
    let mut out: String = lines.map(|(name, value)| format!("{name:<18} {value}\n")).collect();
    let rows: Vec<Vec<String>> = doctor
        .kernels
        .iter()
        .map(|kernel| {
            let share = if kernel.serves == 0 {
                "unused here".to_owned()
            } else {
                format!("{} of {}", kernel.serves, kernel.of)
            };
            vec![kernel.name.to_owned(), share, kernel.what.to_owned()]
        })
        .collect();
    out.push('\n');
    out += &table(&[("kernel", Align::Left), ("chosen for", Align::Left), ("what it does", Align::Left)], &rows);
    out
}
