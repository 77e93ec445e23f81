//! `halfbyte doctor`: what this machine offers, and what of it is used.

use crate::app::App;
use crate::args::WeightKind;
use crate::failure::Result;
use crate::machine;
use crate::text::{Align, bytes, table};
use halfbyte::Float;
use halfbyte::cpu::isa::Caps;
use halfbyte::cpu::matmul::{self, KERNELS};
use halfbyte::format::FORMATS;
use halfbyte::kernel::Problem;
use serde::Serialize;

/// Show the processor, its instruction sets, memory, and the kernels that serve here.
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
    cuda: &'static str,
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
        isa_limit: std::env::var("HALFBYTE_ISA").ok(),
        bf16_dot: used.bf16_dot,
        last_level_cache_bytes: machine::last_level_cache(),
        memory_bytes: machine::memory_total(),
        memory_available_bytes: machine::memory_available(),
        cuda: "not supported in this version",
        kernels,
    };
    app.result(&doctor, human)
}

fn human(doctor: &Doctor) -> String {
    let size = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), bytes);
    let limit = match &doctor.isa_limit {
        Some(limit) => format!(" (limited by HALFBYTE_ISA={limit})"),
        None => " (set HALFBYTE_ISA to plain, avx2 or avx512 for less)".to_owned(),
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
        ("bf16 dot products", if doctor.bf16_dot { "yes" } else { "no" }.to_owned()),
        ("threads", format!("{} of {}", doctor.threads, doctor.threads_available)),
        ("last-level cache", size(doctor.last_level_cache_bytes)),
        ("memory", format!("{}, {} available", size(doctor.memory_bytes), size(doctor.memory_available_bytes))),
        ("CUDA", doctor.cuda.to_owned()),
    ];
    let mut out: String = lines.iter().map(|(name, value)| format!("{name:<18} {value}\n")).collect();
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
