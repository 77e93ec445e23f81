//! Formats of weights and activations that kernels of their own multiply.

use super::*;

/// Codes of activations lose as much in one kernel as kernel by kernel. Which of two codes a number becomes is chance, and a few positions
/// make much of it: so half of all positions, of the model that ships, against exact activations.
#[test]
fn quantised_activations_lose_no_more_in_one_kernel() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let text = std::fs::read_to_string(stdlib().join("reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let of_case = |case: &serde_json::Value| [ids(&case["prompt_ids"]), ids(&case["new_ids"])].concat();
    let tokens: Vec<u32> = reference["greedy"].as_array().unwrap().iter().flat_map(of_case).take(300).collect();
    // Of groups of 128; of whole rows, whose groups have factors or nothing.
    for [exact, coded] in [["w4a16-g128", "w4a8-g128"], ["w4a16-g128-si8", "w4a8-g128-si8"], ["w8a16", "w8a8"]] {
        let exact = Model::load(&stdlib(), &options(Device::Cpu, Some(exact))).unwrap();
        let (want, vocab) = (all_logits(&exact, &cpu, &tokens), exact.config().spec.vocab);
        let [in_one, by_kernels] = [true, false].map(|persistent| {
            let device = Device::Cuda(Gpu { persistent, ..gpu.clone() });
            let model = Model::load(&stdlib(), &options(device, Some(coded))).unwrap();
            let steps = model.explain(&cpu).unwrap();
            let named = steps.iter().any(|product| product.plans.iter().any(|plan| plan.kernel == "persistent_decode"));
            assert_eq!(named, persistent && gpu.gpu.caps().arch.is_hopper(), "{coded}");
            let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
            session.prefill(&tokens[..8]).unwrap();
            let mut off: Vec<f64> = (8..tokens.len())
                .map(|i| {
                    let want = &want[i * vocab..(i + 1) * vocab];
                    let got = session.decode(tokens[i]).unwrap();
                    let sum: f64 = got.iter().zip(want).map(|(got, want)| f64::from(got - want).powi(2)).sum();
                    (sum / vocab as f64).sqrt()
                })
                .collect();
            off.sort_by(f64::total_cmp);
            off[off.len() / 2]
        });
        println!("{coded}: off by {in_one} in one kernel, by {by_kernels} kernel by kernel");
        assert!(by_kernels > 3e-4, "{coded}: codes lose something: {by_kernels}");
        assert!(in_one <= 1.5 * by_kernels, "{coded}: {in_one}, kernel by kernel {by_kernels}");
    }
}

/// Four windows: what rounds otherwise changes the perplexity of a few by some tenths of a percent.
#[test]
fn two_bits_and_odd_groups_have_the_perplexities_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for format in ["w2a8-g64-asym", "w2a16-g64-asym", "w4a8-g20-asym", "w4a16-g20-asym"] {
        let (want, got) =
            (perplexity(Device::Cpu, Some(format), Some(4)), perplexity(on(&gpu, Float::F16), Some(format), Some(4)));
        assert!((got / want - 1.0).abs() < 1e-2, "{format}: {got}, on the CPU {want}");
    }
}

/// How far logits of a model with random weights lie apart, in one kernel and by kernels one by one, of each position: in deviations of
/// the logits.
fn off_in_one_kernel(gpu: &Gpu, config: &str, format: &str, tokens: &[u32]) -> Vec<f32> {
    let cpu = Cpu::all_threads().unwrap();
    let [in_one, by_kernels] = [true, false].map(|persistent| {
        let config = Config::parse(config, Path::new("config.json")).unwrap();
        let weights = RandomWeights { format: Some(format.parse::<Format>().unwrap().weight), head: None };
        let device = Device::Cuda(Gpu { persistent, ..gpu.clone() });
        let model = Model::random(config, weights, &LoadOptions { device, ..LoadOptions::default() }).unwrap();
        let steps = model.explain(&cpu).unwrap();
        let named = steps.iter().filter(|product| product.plans.iter().any(|plan| plan.kernel == "persistent_decode"));
        // Products of q, k, v and of the output; gate and up; down.
        let expected = if persistent && gpu.gpu.caps().arch.is_hopper() { 4 } else { 0 };
        assert_eq!(named.count(), expected, "{format}");
        let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
        session.prefill(&tokens[..8]).unwrap();
        tokens[8..].iter().map(|&token| session.decode(token).unwrap().to_vec()).collect::<Vec<_>>()
    });
    let deviation = |values: &mut dyn Iterator<Item = f32>, count: usize| {
        (values.map(|v| v * v).sum::<f32>() / count as f32).sqrt()
    };
    let off = in_one.iter().zip(&by_kernels).map(|(got, want)| {
        deviation(&mut got.iter().zip(want).map(|(got, want)| got - want), want.len())
            / deviation(&mut want.iter().copied(), want.len())
    });
    let mut off: Vec<f32> = off.collect();
    off.sort_by(f32::total_cmp);
    println!("{format}: off by {} at the median, {} at most", off[off.len() / 2], off[off.len() - 1]);
    off
}

/// Experts of a token in the kernel of all layers. Which experts a token has is chance where two are about as good: so half of all positions.
#[test]
fn mixtures_in_one_kernel_have_the_logits_of_kernels_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let tokens: Vec<u32> = (0..80).map(|i| (i * 103 + 12) % 517).collect();
    let kinds = [
        r#""model_type": "mixtral", "intermediate_size": 768, "num_local_experts": 5, "num_experts_per_tok": 2"#,
        r#""model_type": "qwen3_moe", "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 40, "num_experts_per_tok": 6, "norm_topk_prob": false"#,
    ];
    for (kind, format) in kinds.iter().flat_map(|kind| ["w4a16-g128", "w8a16-g32-asym"].map(|format| (kind, format))) {
        let config = format!(
            r#"{{{kind}, "vocab_size": 517, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 64,
                "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}}"#
        );
        let off = off_in_one_kernel(&gpu, &config, format, &tokens);
        assert!(off[off.len() / 2] <= 1e-2, "{format}: {off:?}");
    }
}

/// Norms behind attention and the MLP, two kinds of rotations, caps of scores, heads of 256: Gemma 2 and 3.
#[test]
fn layers_with_norms_behind_in_one_kernel_have_the_logits_of_kernels_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let tokens: Vec<u32> = (0..80).map(|i| (i * 103 + 12) % 517).collect();
    let kinds = [
        r#""model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0, "sliding_window": 16, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0"#,
        r#""model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0"#,
        r#""model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0"#,
    ];
    for (kind, format) in kinds.iter().flat_map(|kind| ["w4a16-g128", "w8a16-g32-asym"].map(|format| (kind, format))) {
        let config = format!(
            r#"{{{kind}, "vocab_size": 517, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 4,
                "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}}"#
        );
        let off = off_in_one_kernel(&gpu, &config, format, &tokens);
        assert!(off[off.len() - 1] <= 2e-2, "{format}: {off:?}");
    }
}

/// Heads of any multiple of 16 elements, more of them with a key head than a block takes, beyond the positions that one part of attention takes.
#[test]
fn heads_of_any_size_in_one_kernel_have_the_logits_of_kernels_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let tokens: Vec<u32> = (0..330).map(|i| (i * 103 + 12) % 517).collect();
    for ([heads, kv_heads, size], rotated, format) in [
        ([8, 2, 96], 1.0, "w4a16-g128"),
        ([8, 4, 80], 0.25, "w8a16-g32-asym"),
        ([32, 2, 48], 1.0, "w4a8-g128"),
        ([24, 8, 16], 0.5, "w4a16-g32"),
        ([24, 2, 112], 1.0, "w4a16-g128"),
        ([11, 1, 128], 1.0, "w4a16-g128"),
        ([8, 8, 144], 0.5, "w2a16-g64"),
        ([4, 2, 224], 1.0, "w8a16-g128"),
    ] {
        let config = format!(
            r#"{{"model_type": "phi3", "vocab_size": 517, "hidden_size": 384, "intermediate_size": 1280, "num_hidden_layers": 3,
                "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads}, "head_dim": {size}, "partial_rotary_factor": {rotated},
                "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "pad_token_id": 0}}"#
        );
        let off = off_in_one_kernel(&gpu, &config, format, &tokens);
        // Where activations are quantised, which code a number becomes is chance.
        let at = if format == "w4a8-g128" { off.len() / 2 } else { off.len() - 1 };
        assert!(off[at] <= 2e-2, "heads of {size}, {format}: {off:?}");
    }
}
