//! What is launched, and on which device: drawn at random.

use halfbyte::random::splitmix64;
use std::path::Path;
use std::{fmt, fs};

/// A device as the driver is told of it.
#[derive(Clone, Copy)]
pub struct Device {
    compute: u32,
    multiprocessors: u32,
    count: u32,
}

/// Compute capabilities and multiprocessors of devices from Turing to Blackwell, of graphics cards as of data centres.
const DEVICES: [(u32, u32); 15] = [
    (75, 40),   // T4
    (75, 72),   // RTX 6000
    (80, 108),  // A100
    (80, 56),   // A30
    (80, 14),   // a seventh of an A100
    (86, 28),   // RTX 3060
    (86, 84),   // A40
    (87, 16),   // Orin
    (89, 58),   // L4
    (89, 128),  // RTX 4090
    (90, 132),  // H100, H200
    (90, 114),  // H100 with PCIe
    (90, 78),   // H20
    (100, 148), // B200
    (120, 170), // RTX 5090
];

/// A command on a device.
pub struct Case {
    pub device: Device,
    pub arguments: Vec<String>,
}

/// A sequence of random numbers.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        (splitmix64(&mut self.0) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// A size up to 2^`most`, small ones as often as large ones.
    fn size(&mut self, most: usize) -> usize {
        let bits = self.below(most);
        (1 << bits) + self.below(1 << bits)
    }

    /// Several numbers of rows, separated by commas.
    fn rows(&mut self, most: usize) -> String {
        [(); 4].map(|()| self.size(most).to_string()).join(",")
    }
}

/// The models whose files are here, one of each architecture at least.
pub struct SmallModels(Vec<SmallModel>);

struct SmallModel {
    name: String,
    mixture: bool,
}

const SMALL_MODELS: &str = "crates/halfbyte-llm/testdata/architectures";

impl SmallModels {
    /// Errors: the folder or a model's `config.json` cannot be read.
    pub fn new(root: &Path) -> Result<Self, String> {
        let folder = root.join(SMALL_MODELS);
        let unread = |what: &Path, error: std::io::Error| format!("cannot read {}: {error}", what.display());
        let mut models = Vec::new();
        for entry in fs::read_dir(&folder).map_err(|error| unread(&folder, error))? {
            let path = entry.map_err(|error| unread(&folder, error))?.path();
            let config = path.join("config.json");
            let (Some(name), true) = (path.file_name(), path.is_dir()) else { continue };
            let text = fs::read_to_string(&config).map_err(|error| unread(&config, error))?;
            let mixture = text.contains("_experts\"");
            models.push(SmallModel { name: name.to_string_lossy().into_owned(), mixture });
        }
        models.sort_by(|a, b| a.name.cmp(&b.name));
        if models.is_empty() {
            return Err(format!("no models in {}", folder.display()));
        }
        Ok(Self(models))
    }

    fn command(&self, random: &mut Random) -> String {
        let SmallModel { name, mixture } = &self.0[random.below(self.0.len())];
        // Experts that no kernel multiplies together are dealt out by the host, which needs what a kernel would have chosen.
        let together = ["--quantize w4a16-g32", "--quantize w4a8-g32"];
        let others = ["--act a16", "--act a32", "--quantize w8a16-g16", "--quantize w2a16-g16"];
        let layers = if *mixture || random.below(2) == 0 { random.of(&together) } else { random.of(&others) };
        let (depth, batch, kv) =
            (random.of(&[1, 40, 100]), random.of(&[2, 7, 33]), random.of(&["f32", "f16", "bf16", "int8"]));
        format!(
            "bench model {SMALL_MODELS}/{name} --device cuda {layers} --prompt {depth} --generate 3 --repetitions 1 --depth {depth} \
             --batch {batch} --kv {kv} --profile"
        )
    }
}

impl Case {
    pub fn draw(random: &mut Random, small_models: &SmallModels) -> Self {
        let (compute, multiprocessors) = random.of(&DEVICES);
        let (count, text) = match random.below(14) {
            0..5 => (1, product(random)),
            5..9 => (1, convolution(random)),
            9 => (1, experts(random)),
            10 | 11 => (1, small_models.command(random)),
            12 => (1, model(random)),
            _ => (2, format!("{} --tp 2", model(random))),
        };
        let arguments = text.split(' ').map(str::to_owned).collect();
        Self { device: Device { compute, multiprocessors, count }, arguments }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.compute, self.multiprocessors, self.count)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NULL_DRIVER=\"{}\" halfbyte {}", self.device, self.arguments.join(" "))
    }
}

/// A format, but for its group: bits, activations; zero points or offsets, and types of scales.
fn format(random: &mut Random, group: &str) -> (String, bool) {
    let (bits, exact) = (random.of(&[2, 3, 4, 4, 4, 8, 8]), random.below(3) > 0);
    let act = if exact { "a16" } else { random.of(&["a8", "a8-xasym"]) };
    let (zeros, scales) = (random.of(&["", "", "-asym", "-float"]), random.of(&["", "", "-sf32", "-sbf16"]));
    let (act, x) = act.split_once('-').unwrap_or((act, ""));
    let x = if x.is_empty() { String::new() } else { format!("-{x}") };
    (format!("w{bits}{act}{group}{zeros}{scales}{x}"), exact)
}

fn product(random: &mut Random) -> String {
    let group = random.of(&[0, 16, 20, 32, 32, 64, 64, 96, 128, 128, 256]);
    let (format, exact) = format(random, &if group == 0 { String::new() } else { format!("-g{group}") });
    let n = if random.below(2) == 0 { random.size(13) } else { random.of(&[512, 4096, 5120, 11008]) };
    let k = if random.below(2) == 0 { random.size(13) } else { random.of(&[512, 2048, 4096, 8192]) };
    let k = if group == 0 { k } else { k.next_multiple_of(group) };
    let (x, m) = (random.of(&["f16", "bf16", "f32"]), random.rows(12));
    let y = random.of(&["", " --y f32", " --y f32 --round-weights"]);
    let y = if exact && x != "f32" { y } else { "" };
    format!("bench matmul --no-baseline --device cuda --format {format} -n {n} -k {k} -m {m} --x {x}{y}")
}

fn convolution(random: &mut Random) -> String {
    let format = match random.below(8) {
        0 => "f16".into(),
        1 => "f32".into(),
        2 | 3 => "int8".into(),
        _ => format(random, "").0,
    };
    let channels: [usize; 13] = [1, 3, 8, 16, 24, 32, 64, 96, 100, 128, 192, 256, 512];
    let (ci, co, groups) = (random.of(&channels), random.of(&channels), random.of(&[1, 1, 1, 2, 4]));
    let [ci, co] = [ci, co].map(|of| of.next_multiple_of(groups));
    let (co, groups) = if random.below(4) == 0 { (ci, ci) } else { (co, groups) };
    let (kernel, stride, dilation) =
        (random.of(&[1, 1, 3, 3, 5, 7]), random.of(&[1, 1, 2, 3]), random.of(&[1, 1, 1, 2]));
    let size = random.of(&[1, 5, 7, 14, 17, 28, 56, 112]).max((kernel - 1) * dilation + 1);
    let (padding, batch) = (random.below(kernel), random.of(&[1, 2, 5, 16]));
    let x = if format == "int8" { String::new() } else { format!(" --x {}", random.of(&["f16", "bf16", "f32"])) };
    let layout = random.of(&["nhwc", "nhwc", "nchw"]);
    format!(
        "bench conv --no-baseline --device cuda --format {format} --ci {ci} --co {co} --groups {groups} --size {size} \
         --kernel-size {kernel} --stride {stride} --dilation {dilation} --padding {padding} --layout {layout} --batch {batch}{x}"
    )
}

fn experts(random: &mut Random) -> String {
    let format =
        random.of(&["w4a16-g128", "w4a16-g32", "w8a16-g64", "w8a8", "w4a8-g128", "w4a16-g64-asym", "w3a16-g128"]);
    let (count, hidden) = (random.of(&[4, 8, 16, 64, 128]), random.of(&[512, 1024, 2048, 2944]));
    let (top_k, inner, m) = (random.of(&[1, 2, 4]), random.of(&[256, 768, 1536, 2944]), random.rows(11));
    format!(
        "bench experts --device cuda --format {format} --experts {count} --top-k {top_k} --hidden {hidden} --inner {inner} -m {m}"
    )
}

fn model(random: &mut Random) -> String {
    let name = random.of(&[
        "bloom-7b1",
        "gemma-2-9b",
        "gemma-3-1b",
        "gpt-oss-20b",
        "llama-3-8b",
        "llama-3.2-1b",
        "mixtral-8x7b",
        "phi-4",
        "qwen2.5-0.5b",
        "qwen3-30b-a3b",
        "qwen3-4b",
    ]);
    let format =
        random.of(&["w4a16-g128", "w4a16-g32", "w8a16-g128", "w4a8-g128", "w8a8", "w3a16-g64", "w4a16-g64-asym"]);
    let (prompt, batch) = (random.of(&[1, 100, 513]), random.of(&[2, 7, 33, 100]));
    let (kv, head) = (random.of(&["f16", "bf16", "int8"]), random.of(&[4, 8, 16]));
    format!(
        "bench model --random-weights bench/cases/{name}.json --device cuda --format {format} --prompt {prompt} --generate 3 \
         --repetitions 1 --batch {batch} --kv {kv} --head {head}"
    )
}
