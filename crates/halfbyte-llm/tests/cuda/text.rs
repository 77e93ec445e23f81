//! One text on a GPU, token by token.

use super::{all_logits, gpu, on, options, stdlib, worst};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_llm::{Error, Model, Sampler, Sampling, Session};

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// A device that begins to read a token before the host knows it writes the same text; what was begun in vain leaves nothing behind.
fn read_before_it_is_known(session: &mut Session<'_>, prompt: &[u32], text: &[u32]) {
    let mut greedy = Sampler::new(Sampling::default()).unwrap();
    let begin = |session: &mut Session<'_>| {
        session.clear().unwrap();
        session.read_unless(prompt, None).unwrap();
    };
    begin(session);
    for (i, &token) in text[..text.len() - 1].iter().enumerate() {
        assert_eq!(session.next_to_read(&mut greedy).unwrap(), token, "token {i}");
        let nothing = [session.logits().map(|_| 0), session.next(&mut greedy), session.next_to_read(&mut greedy)];
        assert!(nothing.iter().all(|result| matches!(result, Err(Error::EmptyPrompt))), "{nothing:?}");
        session.read_unless(&[token], None).unwrap();
        if i % 7 == 3 {
            assert_eq!(session.next(&mut greedy).unwrap(), text[i + 1], "token {}", i + 1);
        }
    }
    // Another token than that, several, and a shorter text.
    let others = [text[3] ^ 1, 5, 900];
    for (then, kept) in [(&others[..1], 4), (&others[..], 4), (&others[..2], 2)] {
        begin(session);
        session.read_unless(&text[..4], None).unwrap();
        session.next_to_read(&mut greedy).unwrap();
        session.forget(prompt.len() + kept).unwrap();
        let got = session.prefill(then).unwrap().to_vec();
        begin(session);
        session.read_unless(&text[..kept], None).unwrap();
        let want = session.prefill(then).unwrap();
        assert!(worst(&got, want) < 5e-2, "{then:?} after {kept}");
    }
    begin(session);
    let mut draws =
        [0; 2].map(|_| Sampler::new(Sampling { temperature: 0.9, top_k: 40, seed: 5, ..Sampling::default() }).unwrap());
    let [ahead, plain] = &mut draws;
    let mut drawn = Vec::new();
    for _ in 0..30 {
        drawn.push(session.next_to_read(ahead).unwrap());
        session.read_unless(&drawn[drawn.len() - 1..], None).unwrap();
    }
    begin(session);
    for &token in &drawn {
        assert_eq!(session.next(plain).unwrap(), token);
        session.read_unless(&[token], None).unwrap();
    }
}

#[test]
fn texts_go_on_by_their_own_tokens_or_by_others() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let model = Model::load(&stdlib(), &options(on(&gpu, Float::F16), None)).unwrap();
    let mut greedy = Sampler::new(Sampling::default()).unwrap();
    let mut session = Session::new(&model, &cpu, 300).unwrap();
    assert!(matches!(session.next(&mut greedy), Err(Error::EmptyPrompt)));
    // What the device goes on with by itself is what the logits say, step by step.
    let prompt = [1, 77, 300, 9];
    let mut by_logits = vec![argmax(session.prefill(&prompt).unwrap())];
    for i in 0..280 {
        let next = argmax(session.decode(by_logits[i]).unwrap());
        by_logits.push(next);
    }
    session.clear().unwrap();
    session.read_unless(&prompt, None).unwrap();
    let mut by_device = vec![session.next(&mut greedy).unwrap()];
    for i in 0..280 {
        session.read_unless(&[by_device[i]], None).unwrap();
        by_device.push(session.next(&mut greedy).unwrap());
        assert_eq!(session.next(&mut greedy).unwrap(), by_device[i + 1], "asked twice");
    }
    assert_eq!(by_device, by_logits);
    read_before_it_is_known(&mut session, &prompt, &by_device);
    // Another token than the likeliest, a draw, a draw of all rows.
    let other = by_logits[0] ^ 1;
    session.clear().unwrap();
    session.read_unless(&prompt, None).unwrap();
    session.next(&mut greedy).unwrap();
    let after_other = session.decode(other).unwrap().to_vec();
    let whole = all_logits(&model, &cpu, &[&prompt[..], &[other]].concat());
    assert!(worst(&after_other, &whole[prompt.len() * 4096..]) < 5e-2);
    let warm = Sampling { temperature: 0.8, top_k: 50, top_p: 0.95, seed: 11, ..Sampling::default() };
    for options in [
        warm,
        Sampling { top_k: 0, ..warm },
        Sampling { top_p: 1.0, ..warm },
        Sampling { temperature: 1.5, seed: 3, ..Sampling::default() },
        // These the host draws, of the device's logits.
        Sampling { min_p: 0.05, ..warm },
        Sampling { repetition_penalty: 1.3, ..warm },
    ] {
        let (mut on_device, mut on_host) = (Sampler::new(options).unwrap(), Sampler::new(options).unwrap());
        for i in 0..50 {
            let (drawn, wanted) = (session.next(&mut on_device).unwrap(), on_host.next(&after_other).unwrap());
            assert_eq!(drawn, wanted, "draw {i} with {options:?}");
        }
    }
    // The likeliest token of a text that has drawn one, and then the drawn one.
    assert_eq!(session.next(&mut greedy).unwrap(), argmax(&after_other));
    let drawn = session.next(&mut Sampler::new(warm).unwrap()).unwrap();
    session.next(&mut greedy).unwrap();
    let went_on = session.decode(drawn).unwrap().to_vec();
    let whole_on = all_logits(&model, &cpu, &[&prompt[..], &[other, drawn]].concat());
    assert!(worst(&went_on, &whole_on[(prompt.len() + 1) * 4096..]) < 5e-2);
    session.clear().unwrap();
    session.logits_of_all(&[&prompt[..], &[other]].concat(), &mut |_| Ok(())).unwrap();
    assert_eq!(session.next(&mut greedy).unwrap(), argmax(&whole[prompt.len() * 4096..]));
    // Two texts in one model at a time.
    let mut second = Session::new(&model, &cpu, 300).unwrap();
    second.prefill(&prompt).unwrap();
    assert_eq!(second.next(&mut greedy).unwrap(), by_logits[0]);
    assert_eq!(session.len(), 5);
}
