//! Models that ranks share, against the whole ones: every architecture and scheme, groups that do not divide, columns in another
//! order (act-order), and ranks that fail.

use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Act, Format, QTensor};
use halfbyte_checkpoint::{
    Checkpoint, Cut, Job, LinearWeight, Part, Quantization, Target, Verification, Weights, verify_parts, write_model,
    write_part,
};
use halfbyte_llm::comm::Thread;
use halfbyte_llm::{Config, Error, LoadOptions, Model, RandomWeights, Session, eval, shard};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// What each rank does, side by side, with its options.
pub(crate) fn ranks<T: Send>(size: usize, options: &LoadOptions, work: impl Fn(&LoadOptions) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let (work, of) = (&work, |comm: Thread| LoadOptions { comm: Arc::new(comm), ..options.clone() });
        let threads: Vec<_> = Thread::group(size)
            .into_iter()
            .map(|comm| {
                let options = of(comm);
                scope.spawn(move || work(&options))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Logits after each of some tokens.
fn logits(path: &Path, options: &LoadOptions, ids: &[i32]) -> Result<Vec<f32>, Error> {
    logits_of(&Model::load(path, options)?, ids)
}

fn logits_of(model: &Model, ids: &[i32]) -> Result<Vec<f32>, Error> {
    let (cpu, mut got) = (Cpu::new(1)?, Vec::new());
    let mut write = |logits: &[f32]| {
        got.extend_from_slice(logits);
        Ok(())
    };
    let ids = eval::Ids { ids, shape: [1, ids.len()] };
    eval::logits(model, &cpu, &ids, &mut write, &mut |_| ControlFlow::Continue(()))?;
    Ok(got)
}

/// The largest difference as a share of the standard deviation of what is wanted.
fn off(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mean = want.iter().map(|&v| f64::from(v)).sum::<f64>() / want.len() as f64;
    let square = want.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / want.len() as f64;
    let worst = got.iter().zip(want).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    worst / square.sqrt()
}

/// Compares ranks with one that holds everything, for as many of them as the model can be cut for. Ranks that have a part of a group's
/// columns scale what they quantise by themselves: their logits are no further than its from those of exact activations.
pub fn compare(path: &Path, options: &LoadOptions, bound: f64, what: &str) -> usize {
    compare_with(options.quantize.is_none(), path, options, bound, what)
}

/// The same, of ranks that cut the model themselves and, where `parts` says so, of folders with their parts.
pub fn compare_with(parts: bool, path: &Path, options: &LoadOptions, bound: f64, what: &str) -> usize {
    let ids: Vec<i32> = (0..24).map(|i| 3 + i * 7 % 200).collect();
    let exact = LoadOptions { act: Act::A16, ..options.clone() };
    let want = logits(path, &exact, &ids).unwrap();
    let bound = bound + 1.5 * off(&logits(path, options, &ids).unwrap(), &want);
    let mut compared = 0;
    for size in [2, 3, 4] {
        let all = ranks(size, options, |options| logits(path, options, &ids));
        let Ok(first) = &all[0] else {
            // Too few heads or groups: all ranks say so, or that another has.
            for end in &all {
                let text = end.as_ref().unwrap_err().to_string();
                assert!(text.contains("for each rank") && text.contains(&format!("{size} ranks")), "{what}: {text}");
            }
            continue;
        };
        let off = off(first, &want);
        assert!(off <= bound, "{what}, {size} ranks: off by {off:e} of the standard deviation");
        for other in &all {
            let bits = |all: &[f32]| all.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(other.as_ref().unwrap()), bits(first), "{what}: ranks differ");
        }
        if parts {
            let dir = tempfile::tempdir().unwrap();
            write_parts(path, size, dir.path());
            let from_parts = ranks(size, options, |options| {
                logits(&dir.path().join(Part::folder(options.comm.rank())), options, &ids)
            });
            for (own, whole) in from_parts.iter().zip(&all) {
                assert_eq!(own.as_ref().unwrap(), whole.as_ref().unwrap(), "{what}, {size} ranks: parts in folders");
            }
        }
        compared += 1;
    }
    compared
}

/// Each rank draws what it has of a model of random weights: by rows, by columns, heads of several layers in one, experts, biases.
#[test]
fn ranks_of_random_models_are_the_whole() {
    let ids: Vec<i32> = (0..24).map(|i| 3 + i * 7 % 200).collect();
    let configs = [
        r#"{"model_type": "bloom", "hidden_size": 192, "n_layer": 2, "n_head": 6, "vocab_size": 301, "layer_norm_epsilon": 1e-5,
            "apply_residual_connection_post_layernorm": false}"#,
        r#"{"model_type": "qwen2", "vocab_size": 301, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": false}"#,
        r#"{"model_type": "mixtral", "vocab_size": 301, "hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "num_local_experts": 4, "num_experts_per_tok": 2}"#,
    ];
    for (config, format) in configs.iter().flat_map(|config| [None, Some("w4a16-g32")].map(|format| (config, format))) {
        let weights = RandomWeights { format: format.map(|name| name.parse::<Format>().unwrap().weight), head: None };
        let made = |options: &LoadOptions| {
            let model =
                Model::random(Config::parse(config, Path::new("config.json")).unwrap(), weights, options).unwrap();
            (model.parameters(), logits_of(&model, &ids).unwrap())
        };
        let options = LoadOptions::default();
        let (parameters, want) = made(&options);
        for size in [2, 3] {
            let all = ranks(size, &options, made);
            assert!(all.iter().all(|(own, _)| *own < parameters), "{config} {format:?}: a rank has all of it");
            let off = off(&all[0].1, &want);
            assert!(off <= 1e-4, "{config} {format:?}, {size} ranks: off by {off:e} of the standard deviation");
        }
    }
}

/// Writes the parts of a model's ranks, which together are the model.
fn write_parts(path: &Path, size: usize, to: &Path) {
    let whole = Weights::open(path).unwrap();
    let spec = Config::from_weights(&whole).unwrap().spec;
    let parts = shard::parts(&spec, &whole, size).unwrap();
    for (part, cuts) in &parts {
        let to = to.join(Part::folder(part.rank));
        write_part(Job::new(&whole, &to), part, &|module| cuts.get(module).cloned()).unwrap();
    }
    let found = verified(&whole, &parts, to);
    assert!(found.equal(), "{}: {found:?}", path.display());
    let floats =
        |weights: &Weights| weights.checkpoint().tensors().map(|t| t.shape.iter().product::<usize>()).sum::<usize>();
    assert!(found.elements as usize > floats(&whole) / 8 && found.compared >= size);
}

fn verified(whole: &Weights, parts: &[(Part, HashMap<String, Cut>)], folder: &Path) -> Verification {
    let open = |(part, cuts): &(Part, HashMap<String, Cut>)| {
        (Weights::open(folder.join(Part::folder(part.rank))).unwrap(), cuts.clone())
    };
    let opened: Vec<_> = parts.iter().map(open).collect();
    let all: Vec<_> = opened.iter().map(|(weights, cuts)| (weights, cuts.clone())).collect();
    verify_parts(&all, whole, &mut |_, _, _| true).unwrap()
}

#[test]
fn parts_that_are_not_those_of_a_model_are_told() {
    let (dir, ids) = (tempfile::tempdir().unwrap(), (3..9).collect::<Vec<i32>>());
    let (path, to) = (crate::architecture("mixtral"), dir.path());
    write_parts(&path, 2, to);
    // Of another rank, of fewer ranks, quantised on the way, and cut once more.
    let (first, second) = (to.join(Part::folder(0)), to.join(Part::folder(1)));
    let ends = ranks(2, &LoadOptions::default(), |options| logits(&first, options, &ids));
    let texts = ends.iter().map(|end| end.as_ref().unwrap_err().to_string()).collect::<Vec<_>>();
    assert!(texts[1].ends_with("expected rank 0 of 2, whose part the folder holds, got rank 1 of 2"), "{texts:?}");
    assert!(texts[0].starts_with("rank 1 cannot load its part"), "{texts:?}");
    let alone = logits(&first, &LoadOptions::default(), &ids).unwrap_err().to_string();
    assert!(alone.ends_with("got rank 0 of 1"), "{alone}");
    let format = "w4a16-g32".parse::<Format>().unwrap().weight;
    let quantize = LoadOptions { quantize: Some((format, Rtn::default())), ..LoadOptions::default() };
    for end in ranks(2, &quantize, |options| logits(&to.join(Part::folder(options.comm.rank())), options, &ids)) {
        assert!(end.unwrap_err().to_string().contains("weights as they are stored"));
    }
    let (part, again) = (Weights::open(&first).unwrap(), to.join("again"));
    let refused = write_part(Job::new(&part, &again), &part.part().unwrap().unwrap(), &|_| None).unwrap_err();
    assert!(refused.to_string().contains("a whole model") && !again.exists(), "{refused}");
    // Parts of two models do not go together.
    let other = tempfile::tempdir().unwrap();
    write_parts(&crate::architecture("llama"), 2, other.path());
    let mixed = [first, other.path().join(Part::folder(1))];
    for end in ranks(2, &LoadOptions::default(), |options| logits(&mixed[options.comm.rank()], options, &ids)) {
        assert_eq!(end.unwrap_err().to_string(), "rank 1 has another model than rank 0");
    }
    // One number that is another, and a rank that has the rows of the other one.
    let whole = Weights::open(&path).unwrap();
    let parts = shard::parts(&Config::from_weights(&whole).unwrap().spec, &whole, 2).unwrap();
    let file = second.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let mut changed = bytes.clone();
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &changed).unwrap();
    let found = verified(&whole, &parts, to);
    assert!(found.differing.len() == 1 && found.differing[0].elements == 1, "{found:?}");
    assert!(found.differing[0].name.starts_with("rank-1: "), "{found:?}");
    std::fs::write(&file, &bytes).unwrap();
    let twice = [parts[0].clone(), (Part { rank: 0, ..parts[1].0.clone() }, parts[0].1.clone())];
    let found = verified(&whole, &twice, to);
    let lacking = |name: &str| found.only_in_second.iter().any(|lacks| lacks == &format!("rows or columns of {name}"));
    assert!(
        lacking("model.layers.0.self_attn.q_proj.weight") && lacking("model.layers.0.self_attn.o_proj.weight"),
        "{found:?}"
    );
    assert!(!lacking("model.norm.weight") && !found.equal());
}

#[test]
fn every_architecture_on_ranks_has_the_logits_of_one() {
    let (mut compared, mut models) = (0, 0);
    for entry in std::fs::read_dir(crate::architecture("")).unwrap() {
        let name = &entry.unwrap().file_name().into_string().unwrap();
        models += 1;
        compared += compare(&crate::architecture(name), &LoadOptions::default(), 5e-5, name);
        // In groups that heads and inner features do not divide, and of whole rows.
        for format in ["w4a16-g32-asym", "w8a16"] {
            let weight = format.parse::<Format>().unwrap().weight;
            let options = LoadOptions { quantize: Some((weight, Rtn::default())), ..LoadOptions::default() };
            compared += compare(&crate::architecture(name), &options, 1e-4, &format!("{name} in {format}"));
        }
    }
    // As stored and in two formats, on 2, 3 and 4 ranks.
    assert!(models >= 15 && compared == 9 * models, "{compared} of {models} models");
}

/// Quantises the blocks of a model to a folder, columns in an order of their own where `order` says so.
fn quantized(name: &str, target: Target, format: &str, to: &Path, order: impl Fn(usize) -> Option<Vec<u32>>) {
    let wanted = format.parse::<Format>().unwrap().weight;
    let quantization = Quantization {
        target,
        // Routers stay as they are.
        format: &mut |layer| (!layer.name.ends_with(".gate")).then_some(wanted),
        quantize: &mut |_, weight, format| {
            let LinearWeight::Dense { floats, shape: [n, k] } = weight else { panic!("dense") };
            let q = rtn(floats.as_floats(), [*n, *k], format, Rtn::default())?;
            let Some(index) = order(*k) else { return Ok(q) };
            // Other numbers than rounding to nearest would give, but a valid tensor.
            QTensor::new(format, [*n, *k], q.codes().to_vec(), q.scales().to_vec(), q.zeros().clone(), Some(index))
        },
        dense: &mut |_| None,
        untied: None,
    };
    write_model(Job::new(&Weights::open(crate::architecture(name)).unwrap(), to), quantization).unwrap();
}

#[test]
fn every_scheme_on_ranks_has_the_logits_of_one() {
    // A permutation of columns, of which each 32 are a group; 37 divides none of the sizes.
    let shuffled = |k: usize| Some((0..k as u32).map(|j| (j * 37 + 11) % k as u32 / 32).collect::<Vec<u32>>());
    let cases = [
        ("llama", Target::Gptq(None), "w4a16-g32", false),
        ("qwen2", Target::Gptq(None), "w8a16-g32", false),
        ("llama", Target::Gptq(None), "w4a16-g32", true),
        ("mixtral", Target::Gptq(None), "w4a16-g32-asym", true),
        ("llama", Target::Awq, "w4a16-g32-asym", false),
        ("mistral-window", Target::CompressedTensors, "w4a16-g32-asym", false),
        ("qwen3", Target::CompressedTensors, "w8a16", false),
        ("../../../../models/stdlib-11m", Target::Gguf, "w8a16-g32", false),
    ];
    for (name, target, format, act_order) in cases {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join(if matches!(target, Target::Gguf) { "model.gguf" } else { "model" });
        quantized(name, target, format, &to, |k| if act_order { shuffled(k) } else { None });
        for act in [Act::A16, Act::A8] {
            let options = LoadOptions { act, ..LoadOptions::default() };
            let what = format!("{name} in {format}, act-order {act_order}, {act:?}");
            assert!(compare(&to, &options, 1e-4, &what) >= 1, "{what}");
        }
    }
}

#[test]
fn greedy_tokens_of_ranks_are_those_of_transformers() {
    for name in ["llama", "qwen3-moe", "bloom", "gpt-oss"] {
        let expected = Checkpoint::open(crate::architecture(name).join("expected.safetensors")).unwrap();
        let prompt: Vec<u32> = expected.ints("input_ids").unwrap()[..12].iter().map(|&id| id as u32).collect();
        let want: Vec<u32> = expected.ints("greedy_new_ids").unwrap().iter().map(|&id| id as u32).collect();
        let texts = ranks(2, &LoadOptions::default(), |options| {
            let (model, cpu) = (Model::load(&crate::architecture(name), options).unwrap(), Cpu::new(1).unwrap());
            let mut session = Session::new(&model, &cpu, 36).unwrap();
            let ends = model.config().eos.clone();
            let choose = |logits: &[f32]| {
                let all = (0..logits.len() as u32).rev().filter(|id| !ends.contains(id));
                all.max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize])).unwrap()
            };
            let mut text = vec![choose(session.prefill(&prompt).unwrap())];
            while text.len() < want.len() {
                let logits = session.decode(*text.last().unwrap()).unwrap();
                text.push(choose(logits));
            }
            text
        });
        assert!(texts.iter().all(|text| *text == want), "{name}: {texts:?}, expected {want:?}");
    }
}

#[test]
fn a_rank_that_fails_is_named_by_the_others() {
    // One has another model, one another way of loading it, one ends in the middle.
    let ids: Vec<i32> = (3..40).collect();
    let ends = ranks(3, &LoadOptions::default(), |options| {
        let name = if options.comm.rank() == 1 { "llama3-rope" } else { "llama" };
        logits(&crate::architecture(name), options, &ids)
    });
    for end in ends {
        assert_eq!(end.unwrap_err().to_string(), "rank 1 has another model than rank 0");
    }
    let ends = ranks(2, &LoadOptions::default(), |options| {
        let act = if options.comm.rank() == 1 { Act::A8 } else { Act::A16 };
        logits(&crate::architecture("llama"), &LoadOptions { act, ..options.clone() }, &ids)
    });
    for end in ends {
        assert_eq!(end.unwrap_err().to_string(), "rank 1 has another way of loading it than rank 0");
    }
    let ends = ranks(3, &LoadOptions::default(), |options| {
        let last = options.comm.rank() == 2;
        logits(&crate::architecture("llama"), options, if last { &ids[..1] } else { &ids })
    });
    for end in ends {
        let text = end.unwrap_err().to_string();
        assert!(text.starts_with("rank ") && text.contains("numbers where"), "{text}");
    }
    // A rank whose file is broken off tells the others why.
    let broken = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(crate::architecture("llama").join(file), broken.path().join(file)).unwrap();
    }
    let ends = ranks(2, &LoadOptions::default(), |options| {
        let path = if options.comm.rank() == 1 { broken.path().join("none") } else { crate::architecture("llama") };
        logits(&path, options, &ids)
    });
    let texts = ends.into_iter().map(|end| end.unwrap_err().to_string()).collect::<Vec<_>>();
    assert_eq!(texts[0], "rank 1 has ended");
}
