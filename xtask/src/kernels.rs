//! `cargo xtask kernels`: which kernel multiplies every format, on every kind of device and for every number of rows, as the tables of
//! docs/kernels.md; and what share of the limit was measured where there is a record.
//!
//! The choice is a function of a format, a shape and what a device says of itself, so that no device is needed. The test makes the
//! page anew, and looks that nothing is refused.

use crate::bench_results::{Row, read_rows, sorted};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::isa::{Caps as CpuCaps, Isa};
use halfbyte::cuda::Caps;
use halfbyte::cuda::conv;
use halfbyte::cuda::dispatch::Plan;
use halfbyte::cuda::int8;
use halfbyte::cuda::sources::Arch;
use halfbyte::format::FORMATS;
use halfbyte::format::int8::Byte;
use halfbyte::kernel::Problem;
use halfbyte::{Error, Float, Format};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {}

const FILE: &str = "docs/kernels.md";

const HEAD: &str = "# Kernels\n\nMade by `cargo xtask kernels`: what multiplies weights of each format, by the number of rows of x. Where \
a number stands before a kernel, it serves from so many rows on. Of a GPU only what its processor and data sheet say is asked for. \
`simt` and `any_scalar` are scalar; a name that says nothing of the processor runs on all that come after it. `halfbyte explain` says \
the same of any shape, and why no other kernel was taken.\n";

/// Outputs and length of the reduction.
const SHAPE: [usize; 2] = [4096, 4096];

/// Formats of convolutions in groups: all others go the same way.
const GROUPED: [&str; 2] = ["w4a16", "w8a8"];

/// The greatest number of rows.
const MOST_ROWS: usize = 8192;

pub fn run(_: &Args) -> Result<(), String> {
    let root = root()?;
    let path = root.join(FILE);
    std::fs::write(&path, text(&root)?).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

fn root() -> Result<PathBuf, String> {
    Ok(Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?.to_owned())
}

/// CPUs of each family of instruction sets.
const CPUS: [(&str, CpuCaps); 5] = [
    ("neither", CpuCaps { isa: Isa::Plain, bf16_dot: false }),
    ("AVX2", CpuCaps { isa: Isa::Avx2, bf16_dot: false }),
    ("and AVX-VNNI", CpuCaps { isa: Isa::AvxVnni, bf16_dot: false }),
    ("AVX-512 VNNI", CpuCaps { isa: Isa::Avx512, bf16_dot: false }),
    ("and AMX", CpuCaps { isa: Isa::Amx, bf16_dot: true }),
];

/// GPUs that stand for theirs: Turing, Ampere, Hopper.
fn gpus() -> [(&'static str, Caps); 3] {
    let arch = |number, specific| Arch { number, specific, ptx: false };
    [
        (
            "T4 (sm_75)",
            Caps {
                arch: arch(75, false),
                multiprocessors: 40,
                shared_bytes: 65_536,
                l2_bytes: 4 << 20,
                memory_mb_per_s: 320_064,
                clock_khz: 1_590_000,
                ..Caps::H200
            },
        ),
        (
            "A100 (sm_80)",
            Caps {
                arch: arch(80, false),
                multiprocessors: 108,
                shared_bytes: 166_912,
                l2_bytes: 40 << 20,
                memory_mb_per_s: 2_039_040,
                clock_khz: 1_410_000,
                ..Caps::H200
            },
        ),
        ("H200 (sm_90a)", Caps::H200),
    ]
}

fn products(gpu: Caps) -> impl Fn(&Problem) -> Result<&'static str, Error> {
    move |problem| halfbyte::cuda::matmul::select(&gpu, problem, None).map(|kernel| kernel.name)
}

/// Every format that is named, for the activations of each that it may have.
fn formats() -> Result<Vec<Format>, String> {
    FORMATS.iter().map(|name| name.parse().map_err(|e| format!("{name}: {e}"))).collect()
}

/// Numbers of rows at which the choice is asked for: all few ones, and steps of an eighth.
fn rows() -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |&m| Some(m + (m / 8).max(1))).take_while(|&m| m <= MOST_ROWS)
}

/// The kernels of a format by the number of rows: `a`, from 9 rows on `b`. A refusal is the word itself.
fn by_rows(kernel: impl Fn(usize) -> Result<&'static str, Error>) -> String {
    let (mut out, mut last) = (String::new(), "");
    for m in rows() {
        let name = kernel(m).unwrap_or("refused");
        if name != last {
            // The first of them lies between two that were asked for.
            let before = m - (m - 1).min(m / 9);
            let first = (before.max(1)..m).find(|&m| kernel(m).unwrap_or("refused") == name).unwrap_or(m);
            let separator = if out.is_empty() { "" } else { ", " };
            let from = if first == 1 { String::new() } else { format!("{first} ") };
            out += &format!("{separator}{from}`{name}`");
            last = name;
        }
    }
    out
}

fn table<'a>(head: &str, columns: impl Iterator<Item = &'a str>, rows: Vec<(String, Vec<String>)>) -> String {
    let names: Vec<&str> = columns.collect();
    let mut out = format!("\n| {head} | {} |\n|---{}|\n", names.join(" | "), "|---".repeat(names.len()));
    // Formats that are computed alike share a line.
    let mut lines: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    for (name, cells) in rows {
        match lines.iter_mut().find(|(_, other)| *other == cells) {
            Some((names, _)) => names.push(name),
            None => lines.push((vec![name], cells)),
        }
    }
    for (names, cells) in lines {
        out += &format!("| {} | {} |\n", names.join(", "), cells.join(" | "));
    }
    out
}

/// The page.
fn text(root: &Path) -> Result<String, String> {
    let [n, k] = SHAPE;
    let formats = formats()?;
    let problem = |format: Format, x: Float, y: Float, m: usize| Problem { format: Some(format), x, y, m, n, k };
    let mut out = HEAD.to_owned();

    write!(out, "\n## Products on CPUs\n\nx and y in f32, n = {n}, k = {k}. x in bf16 takes `a16_avx512bf16` from 5 rows on where AVX512_BF16 is and no AMX.\n")
        .map_err(|e| e.to_string())?;
    let rows = formats.iter().map(|&format| {
        let cell = |(_, cpu): (&str, CpuCaps)| {
            let kernel = |m| halfbyte::cpu::matmul::select(&cpu, &problem(format, Float::F32, Float::F32, m));
            by_rows(|m| kernel(m).map(|kernel| kernel.name))
        };
        (format.to_string(), CPUS.map(cell).into())
    });
    out += &table("format", CPUS.iter().map(|(name, _)| *name), rows.collect());

    for (title, [x, y]) in [
        ("x and y in f16", [Float::F16; 2]),
        ("x in f16, y in f32, as in a model", [Float::F16, Float::F32]),
        ("x and y in f32", [Float::F32; 2]),
    ] {
        write!(out, "\n## Products on GPUs: {title}\n\nn = {n}, k = {k}, cuBLASLt there.\n")
            .map_err(|e| e.to_string())?;
        let rows = formats.iter().map(|&format| {
            let cell = |(_, gpu): (&str, Caps)| by_rows(|m| products(gpu)(&problem(format, x, y, m)));
            (format.to_string(), gpus().map(cell).into())
        });
        out += &table("format", gpus().map(|(name, _)| name).into_iter(), rows.collect());
    }

    out += "\n## Convolutions on GPUs\n\n3×3, padding 1, 64 to 64 channels, images of 56 × 56 pixel by pixel in f16, batch 1 and 32; formats whose \
groups lie within the channels of a position. Images in planes that none of these reads or writes are copied before and after (`planes`).\n";
    let whole = Geometry { padding: [1; 4], ..Geometry::new(64, 64, [3, 3]) };
    let fits = |format: &&Format| whole.scale_channels(format.weight.group).is_ok();
    let row = |(name, format, geometry): (String, Format, Geometry)| {
        (name, gpus().map(|(_, gpu)| convolution(&gpu, format, geometry)).into())
    };
    let of_formats = formats.iter().filter(fits).map(|&format| (format.to_string(), format, whole));
    let of_groups =
        formats.iter().filter(|format| GROUPED.contains(&format.to_string().as_str())).flat_map(|&format| {
            [64, 16].map(|groups| (format!("{format} in {groups} groups"), format, Geometry { groups, ..whole }))
        });
    let rows = of_formats.chain(of_groups).map(row);
    out += &table("format", gpus().map(|(name, _)| name).into_iter(), rows.collect());

    out += "\n## Layers of bytes on GPUs\n\nu8 to u8, images of 56 × 56, batch 32, weights without zero points unless said.\n";
    let new =
        |ci: usize, co: usize, size: usize| Geometry { padding: [size / 2; 4], ..Geometry::new(ci, co, [size; 2]) };
    let (pixels, planes) = (Layout2d::Nhwc, Layout2d::Nchw);
    let layers = [
        ("64 to 256 1×1", new(64, 256, 1), true, false, pixels),
        ("256 to 64 1×1", new(256, 64, 1), true, false, pixels),
        ("64 to 64 3×3", new(64, 64, 3), true, false, pixels),
        ("80 to 80 3×3", new(80, 80, 3), true, false, pixels),
        ("3 to 64 7×7 of stride 2", Geometry { stride: [2; 2], ..new(3, 64, 7) }, true, false, pixels),
        ("128 to 128 3×3 in 8 groups", Geometry { groups: 8, ..new(128, 128, 3) }, true, false, pixels),
        ("80 to 144 3×3 in 2 groups", Geometry { groups: 2, ..new(80, 144, 3) }, true, false, pixels),
        ("24 to 80 3×3 in 4 groups", Geometry { groups: 4, ..new(24, 80, 3) }, true, false, pixels),
        ("128 to 128 3×3 in 128 groups", Geometry { groups: 128, ..new(128, 128, 3) }, true, false, pixels),
        ("64 to 64 3×3 in planes", new(64, 64, 3), true, false, planes),
        ("64 to 64 3×3 by weights with zero points", new(64, 64, 3), false, false, pixels),
        ("64 to 64 3×3 to f32", new(64, 64, 3), true, true, pixels),
    ];
    let rows = layers.map(|(name, geometry, symmetric, floats, layout)| {
        let cell = |(_, gpu): (&str, Caps)| {
            let shape = Conv2dShape::new(geometry, 32, [56, 56]);
            let problem = |shape| int8::Problem { shape, x: Byte::U8, symmetric, floats, layouts: [layout; 2] };
            let plan = shape.and_then(|shape| int8::Plan::of(&gpu, &problem(shape)));
            format!("`{}`", plan.map_or("refused", |plan| plan.kernel().name))
        };
        (name.to_owned(), gpus().map(cell).into())
    });
    out += &table("layer", gpus().map(|(name, _)| name).into_iter(), rows.into());

    out += "\n## Share of the limit\n\nOf the time that reading or computing takes at least, as measured in the same run; the largest weight \
of each record of `bench/record`, in percent.\n";
    for machine in sorted(&root.join("bench/record"))? {
        for file in sorted(&machine)? {
            let text = std::fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            out += &shares(&text).unwrap_or_default();
        }
    }
    Ok(out)
}

/// What computes a convolution in a format, for one image and for many.
fn convolution(gpu: &Caps, format: Format, geometry: Geometry) -> String {
    let of_batch = |batch: usize| {
        let kernel = || {
            let (shape, x) = (Conv2dShape::new(geometry, batch, [56, 56])?, Float::F16);
            let packed = conv::layout_of(gpu, Some(format), &geometry, x)?;
            let layouts = [Layout2d::Nhwc; 2];
            let problem = conv::Problem { format: Some(format), shape, x, y: x, layouts, packed };
            let explained = Plan::<conv::Convolution>::explain(gpu, &problem);
            Ok::<_, Error>(explained.into_iter().find(|(_, reason)| reason.is_none()).map(|(kernel, _)| kernel.name))
        };
        kernel().ok().flatten().unwrap_or("refused")
    };
    match [1, 32].map(of_batch) {
        [one, many] if one == many => format!("`{one}`"),
        [one, many] => format!("`{one}`, 32 `{many}`"),
    }
}

/// The shares of a record of products. None: it has none.
fn shares(record: &str) -> Option<String> {
    let title = record.lines().next()?.trim_start_matches("# ");
    let rows = read_rows(record)?;
    let size = |row: &Row<'_>| Some(row.get("n")?.parse::<usize>().ok()? * row.get("k")?.parse::<usize>().ok()?);
    let most = rows.iter().filter_map(size).max()?;
    let mut numbers: Vec<usize> = Vec::new();
    let mut formats: Vec<(String, BTreeMap<usize, String>)> = Vec::new();
    let mut shape = String::new();
    for row in rows.iter().filter(|row| size(row) == Some(most)) {
        let (m, name) = (row.get("m")?.parse().ok()?, format!("{}, x {}", row.get("format")?, row.get("x")?));
        let share: f64 = row.get("roofline_percent")?.parse().ok()?;
        shape = format!("({}, {})", row.get("n")?, row.get("k")?);
        if !numbers.contains(&m) {
            numbers.push(m);
        }
        let cell = format!("`{}` {share:.0}", row.get("kernel")?);
        match formats.iter_mut().find(|(other, _)| *other == name) {
            Some((_, cells)) => _ = cells.insert(m, cell),
            None => formats.push((name, BTreeMap::from([(m, cell)]))),
        }
    }
    numbers.sort_unstable();
    let names: Vec<String> = numbers.iter().map(|m| format!("m = {m}")).collect();
    let line = |(name, cells): (String, BTreeMap<usize, String>)| {
        (name, numbers.iter().map(|m| cells.get(m).cloned().unwrap_or_default()).collect())
    };
    let lines = formats.into_iter().map(line).collect();
    Some(format!("\n### {title}, {shape}\n{}", table("format", names.iter().map(String::as_str), lines)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_page_is_what_is_chosen_and_nothing_is_refused() {
        let root = super::root().unwrap();
        let found = std::fs::read_to_string(root.join(super::FILE)).unwrap();
        let text = super::text(&root).unwrap();
        assert!(found == text, "run `cargo xtask kernels`");
        assert!(!text.contains("refused"));
    }
}
