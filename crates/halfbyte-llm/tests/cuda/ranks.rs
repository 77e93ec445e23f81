//! Models that ranks share on a GPU: processes of this program, which write into each other's memory.

use super::{architecture, gpu, options, worst};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_llm::comm::{Alone, Comm, Rendezvous, Tcp};
use halfbyte_llm::device::Gpu;
use halfbyte_llm::{Device, LoadOptions, Model, Session};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// Norms over what ranks add, embeddings that are the head, experts, MLPs beside attention, heads that ranks share.
const ARCHITECTURES: [&str; 7] = ["bloom", "gemma2", "gpt-neox", "llama", "llama-tied-mha", "mixtral", "qwen3"];

/// Formats, types of activations, and how far ranks may be from one, as a share of the logits' standard deviation.
const FORMATS: [(Option<&str>, Float, f32); 4] = [
    (None, Float::F32, 1e-4),
    (None, Float::F16, 2e-2),
    (Some("w4a16-g32-asym"), Float::F16, 2e-2),
    (Some("w8a8-g32"), Float::F16, 0.2),
];

/// Where a rank leaves its logits; what makes a process one.
const FOLDER: &str = "HALFBYTE_TEST_RANKS";

/// Logits of all rows of a prompt, then of a continuation, token by token (recorded from the second on).
fn logits(gpu: &Gpu, comm: Arc<dyn Comm>, name: &str, (format, activations): (Option<&str>, Float)) -> Vec<f32> {
    let gpu = Gpu { activations, persistent: false, ..gpu.clone() };
    let options = LoadOptions { comm, ..options(Device::Cuda(gpu), format) };
    let (model, cpu) = (Model::load(&architecture(name), &options).unwrap(), Cpu::new(1).unwrap());
    let tokens: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 320).collect();
    let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
    let (prompt, rest) = tokens.split_at(tokens.len() / 2);
    let mut all = Vec::new();
    let mut take = |logits: &[f32]| {
        all.extend_from_slice(logits);
        Ok(())
    };
    session.logits_of_all(prompt, &mut take).unwrap();
    for &token in rest {
        all.extend_from_slice(session.decode(token).unwrap());
    }
    all
}

fn file(folder: &Path, rank: usize, name: &str, format: usize) -> std::path::PathBuf {
    folder.join(format!("{name}-{format}-{rank}"))
}

#[test]
#[ignore = "what a process does that another test starts"]
fn a_rank() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let (gpu, at) = (gpu().unwrap(), Rendezvous::from_env().unwrap().unwrap());
    let comm: Arc<dyn Comm> = Arc::new(Tcp::meet(&at).unwrap());
    for name in ARCHITECTURES {
        for (i, (format, activations, _)) in FORMATS.into_iter().enumerate() {
            let logits = logits(&gpu, comm.clone(), name, (format, activations));
            std::fs::write(file(Path::new(&folder), at.rank, name, i), bytemuck::cast_slice(&logits)).unwrap();
        }
    }
}

/// A process that runs the test above.
fn started(folder: &Path, rank: usize, size: usize, port: u16) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["ranks::a_rank", "--exact", "--ignored", "--nocapture"]).env(FOLDER, folder);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
}

fn deviation(values: &[f32]) -> f32 {
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}

#[test]
fn ranks_have_the_logits_of_one() {
    let Some(gpu) = gpu() else { return };
    for size in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut all: Vec<Child> = (0..size).map(|rank| started(folder.path(), rank, size, port)).collect();
        let ends: Vec<_> = all.iter_mut().map(|rank| rank.wait().unwrap()).collect();
        assert!(ends.iter().all(|end| end.success()), "{ends:?}");
        for name in ARCHITECTURES {
            for (i, (format, activations, bound)) in FORMATS.into_iter().enumerate() {
                let of = |rank| std::fs::read(file(folder.path(), rank, name, i)).unwrap();
                let (first, want) = (of(0), logits(&gpu, Arc::new(Alone), name, (format, activations)));
                let got: Vec<f32> = bytemuck::pod_collect_to_vec(&first);
                let off = worst(&got, &want) / deviation(&want);
                println!("{name} {format:?} {activations}, {size} ranks: off by {off:.2e} of the standard deviation");
                assert!(off <= bound, "{name} {format:?} {activations}, {size} ranks: {off}");
                assert!((1..size).all(|rank| of(rank) == first), "{name} {format:?}, {size} ranks: they differ");
            }
        }
    }
}
