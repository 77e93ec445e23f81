//! What the system says of this machine and of this process.

#[cfg(target_arch = "x86_64")]
use halfbyte::cpu::isa::{Caps, Isa};
use std::fs;

/// Assumed where the system does not tell.
const USUAL_CACHE_BYTES: u64 = 32 << 20;

/// Name of the processor.
pub fn cpu_model() -> String {
    let listed = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    listed.unwrap_or_else(|| format!("unknown ({})", std::env::consts::ARCH))
}

/// Bytes of the last-level cache, if the system tells.
pub fn last_level_cache() -> Option<u64> {
    (0..8)
        .filter_map(|index| {
            let folder = format!("/sys/devices/system/cpu/cpu0/cache/index{index}");
            let level: u32 = fs::read_to_string(format!("{folder}/level")).ok()?.trim().parse().ok()?;
            let size = fs::read_to_string(format!("{folder}/size")).ok()?;
            let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
            Some((level, kib << 10))
        })
        .max()
        .map(|(_, bytes)| bytes)
}

/// Bytes of weights that must be passed through before the first of them is in no cache any more.
pub fn cold_bytes() -> u64 {
    (4 * last_level_cache().unwrap_or(USUAL_CACHE_BYTES)).max(160_000_000)
}

/// A field of `/proc/meminfo` or `/proc/self/status`, in bytes.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Bytes of memory, if the system tells.
pub fn memory_total() -> Option<u64> {
    field("/proc/meminfo", "MemTotal")
}

/// Bytes of memory that new work may take, if the system tells.
pub fn memory_available() -> Option<u64> {
    field("/proc/meminfo", "MemAvailable")
}

/// The most bytes of memory that this process has held at once, if the system tells.
pub fn peak_resident() -> Option<u64> {
    field("/proc/self/status", "VmHWM")
}

/// Instruction sets that matter here, with whether the processor has them.
pub fn instruction_sets() -> Vec<(&'static str, bool)> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        // That the system lets this process use.
        ("amx", Caps::detect().isa == Isa::Amx),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}
