//! Models on a GPU against the same models on the CPU, and against what other software computed.
//!
//! Without a GPU these tests say so and pass; `HALFBYTE_REQUIRE_CUDA=1` makes them fail instead.

mod architectures;
mod files;
mod formats;
mod ranks;
mod text;
mod texts;

use half::f16;
use halfbyte::cpu::Cpu;
use halfbyte::quantize::Rtn;
use halfbyte::{Float, Format};
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, DType};
use halfbyte_llm::device::Gpu;
use halfbyte_llm::{
    Config, Device, Error, Finish, KvType, LoadOptions, Model, RandomWeights, Request, Sampling, Session, Tokenizer,
    eval,
};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The first GPU; none, said aloud, where there is none.
fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(why) => {
            assert!(std::env::var("HALFBYTE_REQUIRE_CUDA").map_or(true, |v| v != "1"), "no GPU: {why}");
            eprintln!("skipped: no GPU: {}", why.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

fn on(gpu: &Gpu, activations: Float) -> Device {
    Device::Cuda(Gpu { activations, ..gpu.clone() })
}

fn options(device: Device, format: Option<&str>) -> LoadOptions {
    let Some(format) = format else { return LoadOptions { device, ..LoadOptions::default() } };
    let format: Format = format.parse().unwrap();
    LoadOptions { device, act: format.act, quantize: Some((format.weight, Rtn::default())), ..LoadOptions::default() }
}

/// The repository, or what `HALFBYTE_ROOT` names instead: what of it was brought to another machine.
fn root() -> PathBuf {
    let brought = std::env::var_os("HALFBYTE_ROOT").map(PathBuf::from);
    brought.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
}

fn stdlib() -> PathBuf {
    root().join("models/stdlib-11m")
}

fn architecture(name: &str) -> PathBuf {
    root().join("crates/halfbyte-llm/testdata/architectures").join(name)
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, d| if d.is_nan() { d } else { most.max(d) })
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn all_logits(model: &Model, cpu: &Cpu, tokens: &[u32]) -> Vec<f32> {
    let mut out = Vec::new();
    let mut session = Session::new(model, cpu, tokens.len()).unwrap();
    let take = &mut |logits: &[f32]| {
        out.extend_from_slice(logits);
        Ok(())
    };
    session.logits_of_all(tokens, take).unwrap();
    out
}

#[test]
fn greedy_continuations_equal_the_reference() {
    let Some(gpu) = gpu() else { return };
    let (cpu, tokenizer) = (Cpu::all_threads().unwrap(), Tokenizer::from_folder(&stdlib()).unwrap());
    let text = std::fs::read_to_string(stdlib().join("reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (activations, bound) in [(Float::F32, 2e-3), (Float::F16, 3e-2)] {
        let model = Model::load(&stdlib(), &options(on(&gpu, activations), None)).unwrap();
        for case in reference["greedy"].as_array().unwrap() {
            let (prompt, want) = (ids(&case["prompt_ids"]), ids(&case["new_ids"]));
            let mut session = Session::new(&model, &cpu, prompt.len() + want.len()).unwrap();
            let logits = session.prefill(&prompt).unwrap();
            for top in case["last_logits_top5"].as_array().unwrap() {
                let (token, logit) = (top[0].as_u64().unwrap() as usize, top[1].as_f64().unwrap());
                let error = (f64::from(logits[token]) - logit).abs();
                assert!(error < bound, "{activations}, {token}: {} for {logit}", logits[token]);
            }
            // Twice: the second time from recordings alone.
            for _ in 0..2 {
                session.clear().unwrap();
                let request = Request {
                    prompt: &prompt,
                    max_tokens: want.len(),
                    sampling: Sampling::default(),
                    end_tokens: &[],
                    stop: &[],
                    cancel: None,
                };
                let got = session.generate(&tokenizer, &request, &mut |_| ControlFlow::Continue(())).unwrap();
                assert_eq!((got.tokens, got.finish), (want.clone(), Finish::Length), "{activations}");
            }
        }
    }
}

/// Of the first windows of the validation set, or of all.
fn perplexity(device: Device, format: Option<&str>, windows: Option<usize>) -> f64 {
    let (cpu, tokenizer) = (Cpu::all_threads().unwrap(), Tokenizer::from_folder(&stdlib()).unwrap());
    let documents = eval::documents(&stdlib().join("validation.jsonl")).unwrap();
    let model = Model::load(&stdlib(), &options(device, format)).unwrap();
    let tokens = eval::token_stream(&tokenizer, &documents, model.config().bos).unwrap();
    let tokens = &tokens[..windows.map_or(tokens.len(), |windows| windows * 512)];
    eval::perplexity(&model, &cpu, tokens, 512, &mut |_| ControlFlow::Continue(())).unwrap().perplexity
}

#[test]
fn perplexities_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for format in [None, Some("w4a16-g128"), Some("w4a16-g128-asym"), Some("w8a16"), Some("w3a16-g32-asym")] {
        let want = perplexity(Device::Cpu, format, Some(6));
        for (activations, bound) in [(Float::F32, 1e-5), (Float::F16, 1e-3), (Float::BF16, 5e-3)] {
            let got = perplexity(on(&gpu, activations), format, Some(6));
            println!("{format:?} {activations}: {got:.5}, on the CPU {want:.5}, {:+.4} %", 100.0 * (got / want - 1.0));
            assert!((got / want - 1.0).abs() < bound, "{format:?} {activations}: {got}, on the CPU {want}");
        }
    }
}

/// A small model with biases whose layers of one group are stored in different types.
fn unlike() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(architecture("llama").join("config.json")).unwrap();
    let config = config.replace("\"attention_bias\": false", "\"attention_bias\": true");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let from = Checkpoint::open(architecture("llama")).unwrap();
    let mut tensors: Vec<(String, DType, Vec<usize>, Vec<f32>)> = Vec::new();
    let names: Vec<String> = from.tensor_names().map(str::to_owned).collect();
    for name in names {
        let (shape, values) = (from.info(&name).unwrap().shape.to_vec(), from.floats(&name).unwrap().to_f32());
        let wide = name.contains("k_proj") || name.contains("up_proj");
        if name.contains("self_attn") {
            let bias = (0..shape[0]).map(|i| (i as f32 * 0.7).sin() * 0.1).collect();
            tensors.push((name.replace(".weight", ".bias"), DType::F32, vec![shape[0]], bias));
        }
        tensors.push((name, if wide { DType::F32 } else { DType::F16 }, shape, values));
    }
    let spec = |(name, dtype, shape, _): &(String, DType, Vec<usize>, Vec<f32>)| TensorSpec {
        name: name.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let mut writer = create(dir.path(), &specs, u64::MAX).unwrap();
    for (name, dtype, _, values) in &tensors {
        let bytes: Vec<u8> = match dtype {
            DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        writer.write(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    dir
}

#[test]
fn layers_stored_unlike_and_biases_give_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (cpu, dir) = (Cpu::all_threads().unwrap(), unlike());
    let tokens: Vec<u32> = (0..30).map(|i| (i * 37 + 5) % 320).collect();
    for format in [None, Some("w4a16-g32-asym")] {
        let model = Model::load(dir.path(), &options(Device::Cpu, format)).unwrap();
        let want = all_logits(&model, &cpu, &tokens);
        let model = Model::load(dir.path(), &options(on(&gpu, Float::F32), format)).unwrap();
        let got = all_logits(&model, &cpu, &tokens);
        assert!(worst(&got, &want) < 1e-4, "{format:?}: {}", worst(&got, &want));
        let mut session = Session::new(&model, &cpu, 30).unwrap();
        for (i, &token) in tokens.iter().enumerate() {
            let error = worst(session.decode(token).unwrap(), &want[i * 320..][..320]);
            assert!(error < 1e-4, "{format:?}, position {i}: {error}");
        }
    }
}

#[test]
fn a_batched_prefill_equals_token_by_token() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    for (activations, bound) in [(Float::F32, 1e-4), (Float::F16, 5e-2)] {
        let model = Model::load(&stdlib(), &options(on(&gpu, activations), Some("w4a16-g128"))).unwrap();
        let begun = std::time::Instant::now();
        model.prepare(&|_, _| ()).unwrap();
        println!("{activations}: kernels ready after {:.1} ms", 1e3 * begun.elapsed().as_secs_f64());
        let tokens: Vec<u32> = (0..700).map(|i| (i * 1_103 + 12) % 4096).collect();
        let batched = all_logits(&model, &cpu, &tokens);
        let mut single = Session::new(&model, &cpu, 700).unwrap();
        // Over the borders of parts and of recordings, from the beginning and from a prompt.
        for begin in [0, 500] {
            single.clear().unwrap();
            if begin > 0 {
                single.prefill(&tokens[..begin]).unwrap();
            }
            for (i, &token) in tokens.iter().enumerate().skip(begin) {
                let logits = single.decode(token).unwrap();
                let error = worst(logits, &batched[i * 4096..][..4096]);
                assert!(error < bound, "{activations}, position {i}: {error}");
            }
        }
        assert!(matches!(single.decode(1), Err(Error::ContextFull { limit: 700, got: 701 })));
    }
}

/// Quantised where it is made or by kernels of its own, many tokens at once or one by one: the same bits.
#[test]
fn quantized_activations_are_the_same_wherever_they_are_quantized() {
    let Some(gpu) = gpu() else { return };
    if gpu.gpu.caps().arch.number != 90 {
        eprintln!("skipped: quantised activations are multiplied on Hopper alone");
        return;
    }
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..200).map(|i| (i * 1_103 + 12) % 4096).collect();
    for format in ["w4a8-g128", "w4a8-g32-asym", "w8a8", "w4a8-g64-xasym"] {
        for activations in [Float::F16, Float::F32] {
            let logits = |fused| {
                let device = Device::Cuda(Gpu { activations, fused, ..gpu.clone() });
                let model = Model::load(&stdlib(), &options(device, Some(format))).unwrap();
                let mut logits = all_logits(&model, &cpu, &tokens);
                let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
                session.prefill(&tokens[..150]).unwrap();
                for &token in &tokens[150..] {
                    logits.extend_from_slice(session.decode(token).unwrap());
                }
                logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert!(logits(true) == logits(false), "{format}, {activations}: other bits");
        }
    }
}

/// Over the whole validation set, 257 windows: a difference in the last bit of a float moves codes of x by one here and there, from
/// one instruction set of a CPU to another too, which changes the perplexity of 6 windows by 0.2 %.
#[test]
fn perplexities_with_quantized_activations_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for format in ["w4a8-g128", "w8a8", "w4a8-g128-asym-xasym"] {
        let want = perplexity(Device::Cpu, Some(format), None);
        for (activations, bound) in [(Float::F32, 1e-3), (Float::F16, 2e-3)] {
            let got = perplexity(on(&gpu, activations), Some(format), None);
            println!("{format} {activations}: {got:.5}, on the CPU {want:.5}, {:+.4} %", 100.0 * (got / want - 1.0));
            assert!((got / want - 1.0).abs() < bound, "{format} {activations}: {got}, on the CPU {want}");
        }
    }
}

/// A model of random weights, small, with biases of attention.
fn random(device: Device, format: Option<&str>, head: Option<&str>, tied: bool) -> Model {
    let config = format!(
        r#"{{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 517, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": {tied}}}"#
    );
    let config = Config::parse(&config, Path::new("config.json")).unwrap();
    let parse = |name: &str| name.parse::<Format>().unwrap();
    let act = format.map_or(halfbyte::Act::A16, |format| parse(format).act);
    let weights = RandomWeights { format: format.map(|f| parse(f).weight), head: head.map(|head| parse(head).weight) };
    Model::random(config, weights, &LoadOptions { device, act, ..LoadOptions::default() }).unwrap()
}

/// Drawn on the device they are those that are drawn in memory: floats, codes of both layouts, heads, biases, norms.
#[test]
fn random_weights_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..70).map(|i| (i * 103 + 12) % 517).collect();
    let formats =
        [None, Some("w4a16-g128"), Some("w4a16-g32-asym"), Some("w8a16"), Some("w8a16-g64-asym"), Some("w3a16-g32")];
    for (at, format) in formats.into_iter().enumerate() {
        let head = [None, Some("w8a16-g128"), Some("w4a16-g128")][at % 3];
        let tied = at % 2 == 0;
        let want = random(Device::Cpu, format, head, tied);
        let want_logits = all_logits(&want, &cpu, &tokens);
        let size = (want_logits.iter().map(|v| v * v).sum::<f32>() / want_logits.len() as f32).sqrt();
        assert!((0.2..5.0).contains(&size), "{format:?}: logits of deviation {size}");
        for (activations, bound) in [(Float::F32, 2e-3), (Float::F16, 2e-2)] {
            let model = random(on(&gpu, activations), format, head, tied);
            assert_eq!(model.parameters(), want.parameters(), "{format:?}");
            let logits = all_logits(&model, &cpu, &tokens);
            let far = worst(&logits, &want_logits);
            println!("{format:?} head {head:?} {activations}: {far:.5} off the CPU's, of deviation {size:.2}");
            assert!(far <= bound * size, "{format:?} head {head:?} {activations}: {far} off");
            let again = all_logits(&random(on(&gpu, activations), format, head, tied), &cpu, &tokens);
            assert!(logits == again, "{format:?} {activations}: other logits in a second run");
        }
    }
    if gpu.gpu.caps().arch.number >= 80 {
        for format in ["w4a8-g128", "w8a8", "w4a8-g128-si8"] {
            let model = random(on(&gpu, Float::F16), Some(format), None, false);
            let mut session = Session::new(&model, &cpu, 100).unwrap();
            session.prefill(&tokens).unwrap();
            assert!(session.decode(3).unwrap().iter().all(|logit| logit.is_finite()), "{format}");
            // Forgotten, and written again.
            session.forget(tokens.len()).unwrap();
            assert_eq!((session.len(), session.decode(3).unwrap().len()), (tokens.len(), 517));
        }
    }
}

/// Token by token, all layers in one kernel and kernel by kernel.
#[test]
fn steps_in_one_kernel_give_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..300).map(|i| (i * 103 + 12) % 517).collect();
    for format in ["w4a16-g128", "w4a16-g32-asym", "w8a16-g64-asym"] {
        let want = all_logits(&random(Device::Cpu, Some(format), None, false), &cpu, &tokens);
        let deviation = |values: &mut dyn Iterator<Item = f32>| {
            let (sum, count) = values.fold((0.0, 0), |(sum, count), v| (sum + f64::from(v) * f64::from(v), count + 1));
            (sum / f64::from(count)).sqrt()
        };
        let size = deviation(&mut want.iter().copied());
        let [in_one, by_kernels] = [true, false].map(|persistent| {
            let device = Device::Cuda(Gpu { persistent, ..gpu.clone() });
            let model = random(device, Some(format), None, false);
            let steps: Vec<_> = model.explain(&cpu).unwrap();
            let named = steps.iter().any(|product| product.plans.iter().any(|plan| plan.kernel == "persistent_decode"));
            assert_eq!(named, persistent && gpu.gpu.caps().arch.is_hopper(), "{format}");
            let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
            // A prompt first, so that the cache has what another kernel wrote; then it is forgotten from a position on.
            session.prefill(&tokens[..100]).unwrap();
            session.forget(40).unwrap();
            let mut got = Vec::new();
            tokens[40..].iter().for_each(|&token| got.extend_from_slice(session.decode(token).unwrap()));
            let off = deviation(&mut got.iter().zip(&want[517 * 40..]).map(|(got, want)| got - want));
            println!("{format} {persistent}: {off:.5} off the CPU's, of deviation {size:.2}");
            off
        });
        // Both round to halves in the same places.
        assert!(
            in_one <= 1.2 * by_kernels && in_one <= 2e-2 * size,
            "{format}: {in_one}, kernel by kernel {by_kernels}"
        );
    }
}

#[test]
fn a_profile_has_the_steps_of_the_cpu_and_leaves_the_text_as_reading_does() {
    let (Some(gpu), cpu) = (gpu(), Cpu::all_threads().unwrap()) else { return };
    let tokens: Vec<u32> = (0..70).map(|i| (i * 89 + 5) % 300).collect();
    for (format, head, tied) in
        [(None, None, true), (Some("w4a16-g128"), Some("w8a16-g128"), false), (Some("w4a8-g64"), None, false)]
    {
        let on_cpu = random(Device::Cpu, format, head, tied);
        let model = random(on(&gpu, Float::F16), format, head, tied);
        let [mut session, mut other] = [(); 2].map(|()| Session::new(&model, &cpu, 80).unwrap());
        let mut of_cpu = Session::new(&on_cpu, &cpu, 80).unwrap();
        // Several rows, then one; what is recorded before and behind them goes on from there.
        for some in [&tokens[..60], &tokens[60..61], &tokens[61..62]] {
            let (got, mut want) = (session.profile(some).unwrap(), of_cpu.profile(some).unwrap());
            // Products of codes gate what they leave.
            want.steps.retain(|step| format.is_none() || step.name != "activation");
            assert_eq!(got.steps.len(), want.steps.len(), "{format:?}");
            for (got, want) in got.steps.iter().zip(&want.steps) {
                assert_eq!((got.name, got.layer, got.rows, got.flop), (want.name, want.layer, want.rows, want.flop));
            }
            assert!(got.steps.iter().all(|step| !step.kernel.is_empty() && step.bytes > 0.0 && step.seconds > 0.0));
            let sum: f64 = got.steps.iter().map(|step| step.seconds).sum();
            // Events count halves of a microsecond.
            assert!(sum <= got.seconds + 0.5e-6 * got.steps.len() as f64, "{format:?}: {sum} of {}", got.seconds);
            other.read_unless(some, None).unwrap();
        }
        for &token in &tokens[62..66] {
            let (got, want) = (session.decode(token).unwrap(), other.decode(token).unwrap());
            // Other kernels add sums in another order, and some numbers round to other halves or codes.
            assert!(worst(got, want) < 0.1, "{format:?}");
        }
    }
}

#[test]
fn keys_and_values_of_every_type_give_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..200).map(|i| (i * 103 + 12) % 4096).collect();
    // Of floats all of it is compared with f32; codes with the same codes, but for those of keys that were rounded otherwise.
    for (kv, of_cpu, bound) in [
        (KvType::F32, KvType::F32, 1e-4),
        (KvType::F16, KvType::F32, 2e-3),
        (KvType::Bf16, KvType::F32, 2e-2),
        (KvType::Int8, KvType::Int8, 1e-2),
    ] {
        let with = |device, kv| LoadOptions { kv: Some(kv), ..options(device, None) };
        let want = all_logits(&Model::load(&stdlib(), &with(Device::Cpu, of_cpu)).unwrap(), &cpu, &tokens);
        let largest = want.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        let model = Model::load(&stdlib(), &with(on(&gpu, Float::F32), kv)).unwrap();
        assert_eq!((model.kv_type(), model.kv_bytes_per_token()), (kv, kv.bytes(64) * 2 * 2 * 6));
        let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
        session.prefill(&tokens[..150]).unwrap();
        for (i, &token) in tokens.iter().enumerate().skip(150) {
            let error = worst(session.decode(token).unwrap(), &want[i * 4096..(i + 1) * 4096]);
            assert!(error < bound * largest, "{kv}, position {i}: {error} of {largest}");
        }
    }
}
