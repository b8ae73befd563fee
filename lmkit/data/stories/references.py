"""How a story refers to what it has introduced: by name, by a description, in someone's voice."""

# The same person or thing has several names, all of which an attentive reader knows from the first lines.
REFERENCES = """
hero
- {hero}
- {hero}
- <full_name:hero_type>
- <full_name:hero_type>
- the {hero_trait} {hero_look} {hero_kind}
- the {hero_kind} with the {whole_wear}
- {hero_trait} {hero}

full_name:child
- {hero} {hero_surname}
full_name:animal
- {hero} the {hero_kind}

he
- {he}
- <hero>

walked
- {walked}
- {walk_how} {walked}

pal
- {pal}
- the {pal_trait} {pal_look} {pal_kind}
- <pal_full:pal_type>
- <pal_full:pal_type>

pal_full:child
- {his} friend {pal}
- {pal} {pal_surname}
pal_full:animal
- {pal} the {pal_kind}

elder
- {elder}
- {elder_look} {elder}

neighbor
- {neighbor}
- {neighbor} the {job}
- the {job}

thing
- {color_thing}
- {whole_thing}
- {whole_thing}
gift
- {color_gift}
- {whole_gift}
- {whole_gift}
other
- {color_other}
- {whole_other}
- {whole_other}
beast
- {beast}
- {beast_look} {beast}
building
- {building}
- {whole_building}
- {whole_building}
breakable
- {breakable}
- {whole_breakable}
- {whole_breakable}
house
- {house}
- {whole_house}
place
- {place}
- {whole_place}
in_place
- {in_place}
- {in_whole_place}
far
- {far}
- {whole_far}
in_far
- {in_far}
- {in_whole_far}
wear
- {wear}
- {whole_wear}
- {whole_wear}
food
- {food}
- {plain_food}

thing_how
- it {thing_how}
- it {thing_how} near {landmark}
- it near {landmark}
- it with {elder}
- the <thing> {thing_how}
- it in {his} <wear>
- it {thing_how} with {neighbor}
gift_how
- it {gift_how}
- it {gift_how} near {landmark}
- it with {elder}
- the <gift> {gift_how}
- it with {neighbor}

hero_said
- {said} <hero>
- {said} <hero> in {a_hero_voice}
- {said} <hero> and {hero_quirk}
pal_said
- {replied} <pal>
- {replied} <pal> in {a_pal_voice}
- {replied} <pal> and {pal_quirk}
elder_said
- {replied} <elder>
- {replied} <elder> and {elder_quirk}
"""
