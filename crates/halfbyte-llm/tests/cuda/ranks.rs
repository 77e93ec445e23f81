//! Models that ranks share on a GPU: processes of this program, which write into each other's memory.

use super::{architecture, gpu, options, worst};
use halfbyte::cpu::Cpu;
use halfbyte::{Float, Format};
use halfbyte_llm::comm::{Alone, Comm, Rendezvous, Tcp};
use halfbyte_llm::device::Gpu;
use halfbyte_llm::{Config, Device, Error, LoadOptions, Model, RandomWeights, Session};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Norms over what ranks add, embeddings that are the head, experts, MLPs beside attention, heads that ranks share.
const ARCHITECTURES: [&str; 7] = ["bloom", "gemma2", "gpt-neox", "llama", "llama-tied-mha", "mixtral", "qwen3"];

/// Formats, types of activations, and how far ranks may be from one, as a share of the logits' standard deviation.
const FORMATS: [(Option<&str>, Float, f32); 4] = [
    (None, Float::F32, 1e-4),
    (None, Float::F16, 2e-2),
    (Some("w4a16-g32-asym"), Float::F16, 2e-2),
    (Some("w8a8-g32"), Float::F16, 0.2),
];

/// The place among them of what a step in one kernel takes.
const ASYMMETRIC: usize = 2;

/// Where a rank leaves its logits; what makes a process one.
const FOLDER: &str = "HALFBYTE_TEST_RANKS";

/// Models whose steps of one token are one kernel, on each rank too.
const ONE_KERNEL: [&str; 3] = ["one kernel", "one kernel with experts", "one kernel with LayerNorms"];

/// Models of prompts whose rows ranks divide, one of them with an MLP beside attention.
const LONG: [&str; 3] = ["long prompt", "long prompt with LayerNorms", "long prompt, MLP beside attention"];

/// Of random weights; None: of a file.
fn random(name: &str) -> Option<Config> {
    let at = ONE_KERNEL.iter().chain(&LONG).position(|&known| known == name)?;
    let hidden = [512, 512, 768, 2304, 2304, 2304][at];
    let llama = |kind: &str| {
        format!(
            r#"{{{kind}, "hidden_size": {hidden}, "num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 6,
                "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024, "vocab_size": 320,
                "hidden_act": "silu", "tie_word_embeddings": false}}"#
        )
    };
    let config = match at {
        0 | 3 => llama(r#""model_type": "llama", "intermediate_size": 1536"#),
        1 => llama(
            r#""model_type": "qwen3_moe", "intermediate_size": 1024, "moe_intermediate_size": 768, "num_experts": 8,
                "num_experts_per_tok": 2, "norm_topk_prob": true"#,
        ),
        5 => format!(
            r#"{{"model_type": "gpt_neox", "hidden_size": {hidden}, "num_hidden_layers": 3, "num_attention_heads": 12, "vocab_size": 320,
                "intermediate_size": 1536, "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "use_parallel_residual": true,
                "hidden_act": "gelu", "max_position_embeddings": 1024, "tie_word_embeddings": false}}"#
        ),
        _ => format!(
            r#"{{"model_type": "bloom", "hidden_size": {hidden}, "n_layer": 3, "n_head": 12, "vocab_size": 320,
                "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": false}}"#
        ),
    };
    Some(Config::parse(&config, Path::new("config.json")).unwrap())
}

/// Logits of all rows of a prompt, then of a continuation, token by token (recorded from the second on).
fn logits(gpu: &Gpu, comm: Arc<dyn Comm>, name: &str, (format, activations): (Option<&str>, Float)) -> Vec<f32> {
    let gpu = Gpu { activations, persistent: ONE_KERNEL.contains(&name), ..gpu.clone() };
    let (device, cpu) = (Device::Cuda(gpu), Cpu::new(1).unwrap());
    let model = if let Some(config) = random(name) {
        let format = format.map(|format| format.parse::<Format>().unwrap().weight);
        let options = LoadOptions { comm, ..options(device, None) };
        Model::random(config, RandomWeights { format, head: None }, &options).unwrap()
    } else {
        Model::load(&architecture(name), &LoadOptions { comm, ..options(device, format) }).unwrap()
    };
    let prompt = if LONG.contains(&name) { 530 } else { 12 };
    let tokens: Vec<u32> = (0..prompt + 12).map(|i| (i * 37 + 5) % 320).collect();
    let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
    let (prompt, rest) = tokens.split_at(prompt as usize);
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

/// What is computed with each number of ranks: models, formats.
fn cases() -> impl Iterator<Item = (&'static str, usize)> {
    let of_all = ARCHITECTURES.into_iter().flat_map(|name| (0..FORMATS.len()).map(move |format| (name, format)));
    of_all.chain(ONE_KERNEL.into_iter().chain(LONG).map(|name| (name, ASYMMETRIC)))
}

fn file(folder: &Path, rank: usize, name: &str, format: usize) -> std::path::PathBuf {
    folder.join(format!("{name}-{format}-{rank}"))
}

#[test]
#[ignore = "what a process does that another test starts"]
fn a_rank() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let at = Rendezvous::from_env().unwrap().unwrap();
    // Each has a GPU of its own, as far as there are some.
    let gpu = Gpu::open((at.rank % halfbyte::cuda::Gpu::count()) as u32).unwrap();
    let comm: Arc<dyn Comm> = Arc::new(Tcp::meet(&at).unwrap());
    for (name, i) in cases() {
        let (format, activations, _) = FORMATS[i];
        let logits = logits(&gpu, comm.clone(), name, (format, activations));
        std::fs::write(file(Path::new(&folder), at.rank, name, i), bytemuck::cast_slice(&logits)).unwrap();
    }
}

/// Decodes until another rank has left; then says what it is told of that.
#[test]
#[ignore = "what a process does that another test starts"]
fn a_rank_without_end() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let at = Rendezvous::from_env().unwrap().unwrap();
    let gpu = Gpu::open((at.rank % halfbyte::cuda::Gpu::count()) as u32).unwrap();
    let options = LoadOptions { comm: Arc::new(Tcp::meet(&at).unwrap()), ..options(Device::Cuda(gpu), None) };
    let (model, cpu) = (Model::load(&architecture("llama"), &options).unwrap(), Cpu::new(1).unwrap());
    let mut session = Session::new(&model, &cpu, 16).unwrap();
    session.prefill(&[1, 2, 3]).unwrap();
    std::fs::write(folder.join(format!("begun-{}", at.rank)), "").unwrap();
    let why = loop {
        session.forget(3).unwrap();
        if let Err(why) = session.decode(7) {
            break why;
        }
    };
    std::fs::write(folder.join(format!("end-{}", at.rank)), why.to_string()).unwrap();
}

/// Begins a text for which one rank has no memory, then one for which all have.
#[test]
#[ignore = "what a process does that another test starts"]
fn a_rank_that_lacks_memory() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let at = Rendezvous::from_env().unwrap().unwrap();
    let gpu = Gpu::open((at.rank % halfbyte::cuda::Gpu::count()) as u32).unwrap();
    let options = LoadOptions { comm: Arc::new(Tcp::meet(&at).unwrap()), ..options(Device::Cuda(gpu), None) };
    let mut config = random(ONE_KERNEL[0]).unwrap();
    config.spec.max_context = 1 << 30;
    let weights = RandomWeights { format: Some("w4a16-g32-asym".parse::<Format>().unwrap().weight), head: None };
    let (model, cpu) = (Model::random(config, weights, &options).unwrap(), Cpu::new(1).unwrap());
    for lacking in [1, 0] {
        let context = if at.rank == lacking { 1 << 30 } else { 16 };
        let why = Session::new(&model, &cpu, context).unwrap_err();
        assert_eq!(matches!(why, Error::Rank { rank, .. } if rank == lacking), at.rank != lacking, "{why}");
        let mut session = Session::new(&model, &cpu, 16).unwrap();
        session.prefill(&[1, 2, 3]).unwrap();
        let logits = session.decode(7).unwrap();
        std::fs::write(folder.join(format!("{lacking}-{}", at.rank)), bytemuck::cast_slice(logits)).unwrap();
    }
}

/// A process that runs one of the tests above; by NCCL if asked for.
fn started(test: &str, folder: &Path, [rank, size]: [usize; 2], port: u16, collectives: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture"]).env(FOLDER, folder);
    command.env("HALFBYTE_COLLECTIVES", collectives);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
}

fn deviation(values: &[f32]) -> f32 {
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}

fn start(test: &str, folder: &Path, size: usize, collectives: &str) -> Vec<Child> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..size).map(|rank| started(test, folder, [rank, size], port, collectives)).collect()
}

fn compare(gpu: &Gpu, size: usize, collectives: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut all = start("ranks::a_rank", folder.path(), size, collectives);
    let ends: Vec<_> = all.iter_mut().map(|rank| rank.wait().unwrap()).collect();
    assert!(ends.iter().all(|end| end.success()), "{ends:?}");
    for (name, i) in cases() {
        let (format, activations, bound) = FORMATS[i];
        let of = |rank| std::fs::read(file(folder.path(), rank, name, i)).unwrap();
        let (first, want) = (of(0), logits(gpu, Arc::new(Alone), name, (format, activations)));
        let got: Vec<f32> = bytemuck::pod_collect_to_vec(&first);
        let off = worst(&got, &want) / deviation(&want);
        println!(
            "{name} {format:?} {activations}, {size} ranks {collectives}: off by {off:.2e} of the standard deviation"
        );
        assert!(off <= bound, "{name} {format:?} {activations}, {size} ranks: {off}");
        assert!((1..size).all(|rank| of(rank) == first), "{name} {format:?}, {size} ranks: they differ");
    }
}

#[test]
fn ranks_have_the_logits_of_one() {
    let Some(gpu) = gpu() else { return };
    [2, 3].into_iter().for_each(|size| compare(&gpu, size, "memory"));
}

/// Whether there are two GPUs: NCCL takes no two ranks on one.
fn two_gpus() -> Option<Gpu> {
    let gpu = gpu().filter(|_| halfbyte::cuda::Gpu::count() > 1);
    if gpu.is_none() {
        eprintln!("skipped: NCCL needs a GPU for each rank");
    }
    gpu
}

#[test]
fn ranks_by_nccl_have_the_logits_of_one() {
    let Some(gpu) = two_gpus() else { return };
    compare(&gpu, 2, "nccl");
}

#[test]
fn a_rank_that_lacks_memory_is_named_and_the_next_text_begins() {
    if gpu().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut all = start("ranks::a_rank_that_lacks_memory", folder.path(), 2, "memory");
    let ends: Vec<_> = all.iter_mut().map(|rank| rank.wait().unwrap()).collect();
    assert!(ends.iter().all(|end| end.success()), "{ends:?}");
    let of = |lacking, rank| std::fs::read(folder.path().join(format!("{lacking}-{rank}"))).unwrap();
    assert!([[0, 1], [1, 0], [1, 1]].iter().all(|&[lacking, rank]| of(lacking, rank) == of(0, 0)));
}

/// Of two ranks one is killed while the other's GPU waits for it, or soon will.
fn kill(gone: usize, collectives: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut all = start("ranks::a_rank_without_end", folder.path(), 2, collectives);
    let until = Instant::now() + Duration::from_secs(60);
    while !(0..2).all(|rank| folder.path().join(format!("begun-{rank}")).exists()) {
        assert!(Instant::now() < until, "the ranks have not begun");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(300));
    all[gone].kill().unwrap();
    let (left, killed) = (1 - gone, Instant::now());
    while all[left].try_wait().unwrap().is_none() {
        if killed.elapsed() > Duration::from_secs(30) {
            all[left].kill().unwrap();
            panic!("rank {left} waits without end, {collectives}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    all[gone].wait().unwrap();
    let said = std::fs::read_to_string(folder.path().join(format!("end-{left}"))).unwrap();
    println!("{collectives}: rank {left} ended {:.1} s after: {said}", killed.elapsed().as_secs_f64());
    assert!(said.contains(&format!("rank {gone} ")), "{said}");
}

#[test]
fn a_rank_that_is_killed_is_named() {
    if gpu().is_some() {
        [0, 1].into_iter().for_each(|gone| kill(gone, "memory"));
    }
}

#[test]
fn a_rank_that_is_killed_is_named_by_nccl_too() {
    if two_gpus().is_some() {
        [0, 1].into_iter().for_each(|gone| kill(gone, "nccl"));
    }
}
